"""Declarations of the commands ``sweep``, ``runs`` and ``report``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, hookimpl

D9D_API = 2
#: Requirement of plugin records that need torch. Without torch (as in a CI that only checks job files), using such a
#: record is an error that says how to install torch.
TORCH = frozenset({"import:torch"})


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the commands ``sweep``, ``runs`` and ``report``."""
    yield CommandSpec(
        name="sweep",
        summary="Train a job with every combination of given values.",
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
        summary="Write an HTML page about one or several runs: curves, tables, layout, start-up, plugins.",
        requires=TORCH,
        app=Ref("d9d_reports.commands.report:app"),
    )
