"""Names for conformance suites besides :mod:`d9d_core.extend`: job files, errors, and the tables of names."""

from __future__ import annotations

from d9d_core.components.instantiate import inner_builder
from d9d_core.config.document import Document
from d9d_core.config.job import Mesh
from d9d_core.config.load import validate_job
from d9d_core.config.resolve import choose
from d9d_core.failures import describe
from d9d_core.plugin import installed
from d9d_core.plugin.capabilities import MESH_AXES, MODEL_TRAITS
from d9d_core.plugin.single_file import file_plugin

__all__ = [
    "MESH_AXES",
    "MODEL_TRAITS",
    "Document",
    "Mesh",
    "choose",
    "describe",
    "file_plugin",
    "inner_builder",
    "installed",
    "validate_job",
]
