"""Declaration of the command ``state``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the command ``d9d state``, which shows, converts, compares and uploads model weights."""
    yield CommandSpec(
        name="state",
        summary="Inspect, convert, compare and publish checkpoints.",
        requires=frozenset({"import:torch"}),
        app=Ref("d9d_weights.state.command:app"),
    )
