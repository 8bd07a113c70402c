"""Declaration of the command ``verify``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, hookimpl

D9D_API = 2
#: Without torch (such as in a CI that only checks job files), records that require this are refused with a hint how to
#: install it.
TORCH = frozenset({"import:torch"})


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Command ``verify``."""
    yield CommandSpec(
        name="verify",
        summary="Check that layouts of a job compute the same as one process.",
        requires=TORCH,
        app=Ref("d9d_verify.command:app"),
    )
