"""Names for conformance suites besides :mod:`d9d_core.extend`: job files, errors, and the tables of names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d9d_core.components import instantiate
from d9d_core.config.base import PluginConfig
from d9d_core.config.document import Document
from d9d_core.config.inner import choose
from d9d_core.config.job import Mesh
from d9d_core.config.load import validate_job
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
