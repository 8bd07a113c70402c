"""Names for conformance suites besides :mod:`d9d_core.extend`: job files, errors, and the tables of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d9d_core.components import instantiate
from d9d_core.config.base import PluginConfig
from d9d_core.config.document import Document
from d9d_core.config.inner import choose
from d9d_core.config.job import Mesh
from d9d_core.config.load import validate_job
from d9d_core.config.resolve import tensors_given
from d9d_core.failures import describe
from d9d_core.plugin import Registry, installed
from d9d_core.plugin.capabilities import MESH_AXES, MODEL_TRAITS
from d9d_core.plugin.single_file import file_plugin

__all__ = [
    "MESH_AXES",
    "MODEL_TRAITS",
    "Document",
    "Mesh",
    "describe",
    "file_plugin",
    "given_by",
    "inner_builder",
    "installed",
    "validate_job",
]


def inner_builder(registry: Registry, kind: str, config: PluginConfig) -> Callable[..., Any]:
    """Builder of the components inside a config, the last argument of a composite record's ``build``.

    Args:
        registry: meaning of the names in the config.
        kind: the extension point of the config.
        config: of the outer component.
    """
    return instantiate.inner_builder(choose(registry, kind, kind, config))


def given_by(registry: Registry, dataset: PluginConfig) -> Mapping[str, int] | None:
    """Tensors that every microbatch of a dataset has -> their number of dims; ``None`` if that is not known.

    Args:
        registry: meaning of the names in the config.
        dataset: its config.
    """
    return tensors_given(choose(registry, "dataset", "data", dataset), dataset)
