"""Hooks of a ``plugin.py``. Each has no arguments and yields frozen records.

pluggy only collects these declarations, once, at start-up; it is not used in training steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

from d9d_core import plugin as records

if TYPE_CHECKING:
    from d9d_core.plugin import (
        CapabilitySpec,
        CommandSpec,
        DatasetSpec,
        HealthCheckSpec,
        InferenceTaskSpec,
        JobCheckSpec,
        KernelSpec,
        LrScheduleSpec,
        MetricSpec,
        ModelSpec,
        OptimizerSpec,
        PeftSpec,
        ScheduleSpec,
        StrategySpec,
        SubscriberSpec,
        TaskSpec,
        TrackerSpec,
        ViewSpec,
        WriterSpec,
    )

__all__ = ["API_VERSION", "KINDS", "Kind"]

#: pluggy's project name, and the entry-point group.
PROJECT = "d9d"
#: Version of the plugin interface; a plugin module states the version it was written for as ``D9D_API``.
API_VERSION = 2

hookspec = pluggy.HookspecMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Kind:
    """Extension point: its hook, its record and its section of the job file.

    Attributes:
        name: name in messages, for example ``strategy``.
        hook: hook that yields the records.
        record: type of the records.
        section: job file section that selects a record; ``None`` if no section does.
    """

    name: str
    hook: str
    record: type
    section: str | None


#: Extension points: every kind of record, with its hook and its section of the job file.
KINDS = (
    Kind("model", "d9d_models", records.ModelSpec, "model"),
    Kind("strategy", "d9d_strategies", records.StrategySpec, "parallel"),
    Kind("schedule", "d9d_schedules", records.ScheduleSpec, "pipeline"),
    Kind("task", "d9d_tasks", records.TaskSpec, "task"),
    Kind("inference task", "d9d_inference_tasks", records.InferenceTaskSpec, "task"),
    Kind("writer", "d9d_writers", records.WriterSpec, "writer"),
    Kind("dataset", "d9d_datasets", records.DatasetSpec, "data"),
    Kind("metric", "d9d_metrics", records.MetricSpec, "metrics"),
    Kind("tracker", "d9d_trackers", records.TrackerSpec, "trackers"),
    Kind("peft method", "d9d_peft_methods", records.PeftSpec, "peft"),
    Kind("optimizer", "d9d_optimizers", records.OptimizerSpec, "optimizer"),
    Kind("lr schedule", "d9d_lr_schedules", records.LrScheduleSpec, "lr_schedule"),
    Kind("kernel", "d9d_kernels", records.KernelSpec, "kernels"),
    Kind("subscriber", "d9d_subscribers", records.SubscriberSpec, "subscribers"),
    Kind("view", "d9d_views", records.ViewSpec, None),
    Kind("health check", "d9d_health_checks", records.HealthCheckSpec, None),
    Kind("job check", "d9d_job_checks", records.JobCheckSpec, None),
    Kind("command", "d9d_commands", records.CommandSpec, None),
    Kind("capability", "d9d_capabilities", records.CapabilitySpec, None),
)


@hookspec
def d9d_models() -> Iterable[ModelSpec]:  # type: ignore[empty-body]
    """Model families, selected by ``model``."""


@hookspec
def d9d_strategies() -> Iterable[StrategySpec]:  # type: ignore[empty-body]
    """Parallel strategies, selected by ``parallel``."""


@hookspec
def d9d_schedules() -> Iterable[ScheduleSpec]:  # type: ignore[empty-body]
    """Pipeline schedules, selected by ``pipeline``."""


@hookspec
def d9d_tasks() -> Iterable[TaskSpec]:  # type: ignore[empty-body]
    """Tasks, selected by ``task``."""


@hookspec
def d9d_inference_tasks() -> Iterable[InferenceTaskSpec]:  # type: ignore[empty-body]
    """Tasks of inference jobs, selected by their ``task``."""


@hookspec
def d9d_writers() -> Iterable[WriterSpec]:  # type: ignore[empty-body]
    """Formats of the output of inference jobs, selected by their ``writer``."""


@hookspec
def d9d_datasets() -> Iterable[DatasetSpec]:  # type: ignore[empty-body]
    """Datasets, selected by ``data``."""


@hookspec
def d9d_metrics() -> Iterable[MetricSpec]:  # type: ignore[empty-body]
    """Metrics, selected by ``metrics``."""


@hookspec
def d9d_trackers() -> Iterable[TrackerSpec]:  # type: ignore[empty-body]
    """Trackers, selected by ``trackers``."""


@hookspec
def d9d_peft_methods() -> Iterable[PeftSpec]:  # type: ignore[empty-body]
    """Fine-tuning methods, selected by ``peft``."""


@hookspec
def d9d_optimizers() -> Iterable[OptimizerSpec]:  # type: ignore[empty-body]
    """Optimizers, selected by ``optimizer``."""


@hookspec
def d9d_lr_schedules() -> Iterable[LrScheduleSpec]:  # type: ignore[empty-body]
    """Learning-rate schedules, selected by ``lr_schedule``."""


@hookspec
def d9d_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Backends of ops, selected by ``kernels``."""


@hookspec
def d9d_subscribers() -> Iterable[SubscriberSpec]:  # type: ignore[empty-body]
    """Subscribers to events of the training loop, selected by ``subscribers``."""


@hookspec
def d9d_views() -> Iterable[ViewSpec]:  # type: ignore[empty-body]
    """Views of the grid of ranks, for strategies."""


@hookspec
def d9d_health_checks() -> Iterable[HealthCheckSpec]:  # type: ignore[empty-body]
    """Health checks of ``d9d doctor``."""


@hookspec
def d9d_job_checks() -> Iterable[JobCheckSpec]:  # type: ignore[empty-body]
    """Checks of a job that ``d9d check`` runs in addition to its own."""


@hookspec
def d9d_commands() -> Iterable[CommandSpec]:  # type: ignore[empty-body]
    """Extra sub-commands of ``d9d``."""


@hookspec
def d9d_capabilities() -> Iterable[CapabilitySpec]:  # type: ignore[empty-body]
    """Capability tokens under the plugin's own namespace."""
