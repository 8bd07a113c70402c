"""Declaration of the command ``verify``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, hookimpl

D9D_API = 2
#: In an environment without torch, such as a CI that checks job files, these are refused with its install line.
TORCH = frozenset({"import:torch"})


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Command ``verify``."""
    yield CommandSpec(
        name="verify",
        summary="Compare layouts of a job with one process.",
        requires=TORCH,
        app=Ref("d9d_verify.command:app"),
    )
