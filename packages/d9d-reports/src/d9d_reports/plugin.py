"""Declaration of the commands ``sweep``, ``runs`` and ``report``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, hookimpl

D9D_API = 2
#: In an environment without torch, such as a CI that checks job files, these are refused with its install line.
TORCH = frozenset({"import:torch"})


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Commands over runs."""
    yield CommandSpec(
        name="sweep",
        summary="Train a job with every combination of some values.",
        requires=TORCH,
        app=Ref("d9d_reports.commands.sweep:app"),
    )
    yield CommandSpec(
        name="runs",
        summary="List runs and compare them.",
        requires=TORCH,
        app=Ref("d9d_reports.commands.runs:app"),
    )
    yield CommandSpec(
        name="report",
        summary="Write a page about one run or several: curves, tables, layout, start-up, plugins.",
        requires=TORCH,
        app=Ref("d9d_reports.commands.report:app"),
    )
