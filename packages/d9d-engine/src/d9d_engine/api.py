"""Names for those who train; plugin authors find theirs in :mod:`d9d_core.extend`.

    from d9d_engine.api import Job

    Job.load("job.yaml").build().train()

Importing this module imports no torch; what needs it is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from d9d_core.config.base import PluginConfig, Section
from d9d_core.config.evaluation import Evaluation
from d9d_core.config.job import (
    Batch,
    Checkpoint,
    GradientClipping,
    Gradients,
    Loading,
    Mesh,
    Precision,
    Run,
    Timeouts,
)
from d9d_core.config.schema import job_schema
from d9d_core.config.sections.garbage_collection import GarbageCollection
from d9d_core.config.sections.logging import Logging
from d9d_core.config.sections.plugins import Plugins
from d9d_core.config.sections.profiling import Profiling
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
from d9d_core.events import (
    CheckpointSaved,
    CheckpointStarts,
    DataReady,
    EvaluationEnds,
    EvaluationStarts,
    ForwardBackwardEnds,
    ForwardBackwardStarts,
    JobConfigured,
    ModelPlanned,
    ModelReady,
    OptimizerReady,
    OptimizerStepEnds,
    OptimizerStepStarts,
    SaveReport,
    SleepEnds,
    SleepStarts,
    StepEnds,
    StepResult,
    StepStarts,
    TrainingFailed,
    TrainingFinished,
    TrainingStarts,
    TrainingStopped,
    ValuesLogged,
    WakeEnds,
    WakeStarts,
)
from d9d_core.plugin import PluginPolicy, Registry, discover
from d9d_core.protocols.subscriber import OwnEvent, subscribe

from d9d_engine.job import Job
from d9d_engine.process_env import ProcessEnv
from d9d_engine.trackers.config import ConsoleConfig, JsonlConfig

if TYPE_CHECKING:
    from d9d_weights import ModelDirectory, StateGraph, export_model, load_tensors

    from d9d_engine.checkpoint.store import CheckpointStore
    from d9d_engine.compose.plan import MemoryEstimate, Plan
    from d9d_engine.distributed.mesh import Topology
    from d9d_engine.run.life_cycle import Outcome
    from d9d_engine.run.trainer import Trainer

#: Module of the names that need torch or numpy; they are imported when they are used.
_LAZY = {
    "CheckpointStore": "d9d_engine.checkpoint.store",
    "MemoryEstimate": "d9d_engine.compose.plan",
    "Plan": "d9d_engine.compose.plan",
    "Topology": "d9d_engine.distributed.mesh",
    "Outcome": "d9d_engine.run.life_cycle",
    "Trainer": "d9d_engine.run.trainer",
    "ModelDirectory": "d9d_weights",
    "StateGraph": "d9d_weights",
    "export_model": "d9d_weights",
    "load_tensors": "d9d_weights",
}

__all__ = [
    "Batch",
    "BuildError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointSaved",
    "CheckpointStarts",
    "CheckpointStore",
    "ConsoleConfig",
    "D9dError",
    "DataError",
    "DataReady",
    "Evaluation",
    "EvaluationEnds",
    "EvaluationStarts",
    "ForwardBackwardEnds",
    "ForwardBackwardStarts",
    "GarbageCollection",
    "GradientClipping",
    "Gradients",
    "Job",
    "JobConfigured",
    "JobError",
    "JsonlConfig",
    "Loading",
    "Logging",
    "MemoryEstimate",
    "Mesh",
    "ModelDirectory",
    "ModelPlanned",
    "ModelReady",
    "NonFiniteError",
    "OptimizerReady",
    "OptimizerStepEnds",
    "OptimizerStepStarts",
    "Outcome",
    "OwnEvent",
    "Plan",
    "PluginConfig",
    "PluginError",
    "PluginPolicy",
    "Plugins",
    "Precision",
    "ProcessEnv",
    "Profiling",
    "Registry",
    "Run",
    "SaveReport",
    "Section",
    "SleepEnds",
    "SleepStarts",
    "StateGraph",
    "StepEnds",
    "StepResult",
    "StepStarts",
    "Timeouts",
    "Topology",
    "Trainer",
    "TrainingError",
    "TrainingFailed",
    "TrainingFinished",
    "TrainingStarts",
    "TrainingStopped",
    "ValuesLogged",
    "WakeEnds",
    "WakeStarts",
    "discover",
    "export_model",
    "job_schema",
    "load_tensors",
    "subscribe",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
