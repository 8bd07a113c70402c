"""Declarations of the commands ``new plugin`` and ``plugins conform``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Records of the commands ``d9d new plugin`` and ``d9d plugins conform``."""
    yield CommandSpec(
        name="plugin",
        group="new",
        summary="Write the skeleton of a plugin package.",
        app=Ref("d9d_testing.scaffold.command:app"),
    )
    yield CommandSpec(
        name="conform",
        group="plugins",
        summary="Run the conformance suites of a plugin's components.",
        app=Ref("d9d_testing.conformance.command:app"),
    )
