"""The public names for those who train; plugin authors find theirs in :mod:`d9d_core.plugin`.

Names are loaded when they are used, so that importing this module does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_core.config.base import PluginConfig, Section
    from d9d_core.config.schema import job_schema
    from d9d_core.errors import (
        BuildError,
        CheckpointError,
        D9dError,
        DataError,
        JobError,
        NonFiniteError,
        PluginError,
        TrainingError,
    )
    from d9d_core.plugin import PluginPolicy, Registry, discover

    from d9d_engine.build.plan import Plan
    from d9d_engine.job import Job
    from d9d_engine.run.trainer import Outcome, Trainer

_HOMES = {
    "BuildError": "d9d_core.errors",
    "CheckpointError": "d9d_core.errors",
    "D9dError": "d9d_core.errors",
    "DataError": "d9d_core.errors",
    "Job": "d9d_engine.job",
    "JobError": "d9d_core.errors",
    "NonFiniteError": "d9d_core.errors",
    "Outcome": "d9d_engine.run.trainer",
    "Plan": "d9d_engine.build.plan",
    "PluginConfig": "d9d_core.config.base",
    "PluginError": "d9d_core.errors",
    "PluginPolicy": "d9d_core.plugin",
    "Registry": "d9d_core.plugin",
    "Section": "d9d_core.config.base",
    "Trainer": "d9d_engine.run.trainer",
    "TrainingError": "d9d_core.errors",
    "discover": "d9d_core.plugin",
    "job_schema": "d9d_core.config.schema",
}

__all__ = [
    "BuildError",
    "CheckpointError",
    "D9dError",
    "DataError",
    "Job",
    "JobError",
    "NonFiniteError",
    "Outcome",
    "Plan",
    "PluginConfig",
    "PluginError",
    "PluginPolicy",
    "Registry",
    "Section",
    "Trainer",
    "TrainingError",
    "discover",
    "job_schema",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
