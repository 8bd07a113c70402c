"""Declarations of the commands ``d9d launch submit``, ``status`` and ``cancel``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the commands of the group ``launch``."""
    yield CommandSpec(
        group="launch",
        name="submit",
        summary="Check a job and submit it to an engine such as Slurm.",
        app=Ref("d9d_launch.commands.submit:app"),
    )
    yield CommandSpec(
        group="launch",
        name="status",
        summary="Show the state, the progress and the last lines of a submitted job.",
        app=Ref("d9d_launch.commands.status:app"),
    )
    yield CommandSpec(
        group="launch",
        name="cancel",
        summary="Let a submitted job save, and end it for good.",
        app=Ref("d9d_launch.commands.cancel:app"),
    )
