"""Declaration of the command ``new plugin``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Record of the command ``d9d new plugin``."""
    yield CommandSpec(
        name="plugin",
        group="new",
        summary="Write the skeleton of a plugin package.",
        app=Ref("d9d_testing.scaffold.command:app"),
    )
