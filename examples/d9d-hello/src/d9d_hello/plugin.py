"""Plugin declaration of d9d-hello: the task smooth_lm and the tracker csv."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, TaskSpec, TrackerSpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    """Declare the task, which a job selects by the name in its section ``task``."""
    yield TaskSpec(
        name="smooth_lm",
        summary="Next-token prediction with label smoothing.",
        config=Ref("d9d_hello.config:SmoothLMConfig"),
        build=Ref("d9d_hello.task:SmoothLM"),
    )


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Declare the tracker, which a job selects by its name in the list ``trackers``."""
    yield TrackerSpec(
        name="csv",
        summary="One row per step and value in <run>/metrics.csv.",
        config=Ref("d9d_hello.config:CsvConfig"),
        build=Ref("d9d_hello.tracker:CsvTracker"),
    )
