"""Construction of a model of transformers from its config."""

from __future__ import annotations

from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_moe.balancing.balancers import build_balancers

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
    if config.balancing is None and getattr(native.config, "output_router_logits", False):
        raise BuildError(
            "model.config: output_router_logits asks transformers for its auxiliary loss, which d9d replaces by its "
            "own; set model.balancing, such as [{name: auxiliary_loss, coefficient: 0.001}], or [] to train without"
        )
    balancing = None if config.balancing is None else build_balancers(config.balancing)
    return TransformersModel(native, parts_of(config), stage, balancing)
