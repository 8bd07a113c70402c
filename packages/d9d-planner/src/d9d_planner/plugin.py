"""Declarations of the planner: the command ``plan``, and the predictions of ``d9d check``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, JobCheckSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_job_checks() -> Iterator[JobCheckSpec]:
    """Prediction of a job's memory."""
    yield JobCheckSpec(
        name="prediction",
        summary="Predicted memory of the busiest device.",
        requires=frozenset({"import:torch"}),
        run=Ref("d9d_planner.check:check_predictions"),
        memory=True,
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Command ``plan``."""
    yield CommandSpec(
        name="plan",
        summary="Find the layout of a job that fits and is fastest, without a GPU.",
        app=Ref("d9d_planner.command:app"),
    )
