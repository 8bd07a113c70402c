"""Declarations of the planner: the commands ``plan`` and ``profile``, and the predictions of ``d9d check``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, JobCheckSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_job_checks() -> Iterator[JobCheckSpec]:
    """Declare the job check ``prediction``."""
    yield JobCheckSpec(
        name="prediction",
        summary="Predicted memory of the device that needs the most.",
        requires=frozenset({"import:torch"}),
        run=Ref("d9d_planner.check:check_predictions"),
        memory=True,
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the commands ``plan`` and ``profile``."""
    yield CommandSpec(
        name="plan",
        summary="Find the fastest layout of a job that fits, without a GPU.",
        app=Ref("d9d_planner.command:app"),
    )
    yield CommandSpec(
        name="profile",
        summary="Run some steps of a job, and show where their time goes.",
        requires=frozenset({"import:torch"}),
        app=Ref("d9d_planner.profile.command:app"),
    )
