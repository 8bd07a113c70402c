"""Construction of a model of transformers from its config."""

from __future__ import annotations

from d9d_core.model import Stage

from d9d_transformers.attention import register
from d9d_transformers.config import TransformersConfig
from d9d_transformers.containers import check_container
from d9d_transformers.library import native_config, native_model
from d9d_transformers.mixing import parts_of
from d9d_transformers.model import TransformersModel


def build(config: TransformersConfig, stage: Stage) -> TransformersModel:
    """Build a stage, under the meta device.

    Raises:
        BuildError: transformers has no such model, or d9d cannot train it.
        CheckpointError: transformers refuses the config.
    """
    register()
    native = native_model(native_config(config.config))
    if config.container is not None:
        check_container(config.container, native)
    return TransformersModel(native, parts_of(config), stage)
