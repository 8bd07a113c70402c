"""Hints in errors of the command line: unknown commands and options, and commands without their job file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from d9d_core.words import find

#: How to get a job file; the command belongs to d9d-data.
NEW_JOB = "To write a job file: d9d new job --help"
_PLACE = re.compile(r"[a-z_]+(\.[a-z_]+)*")
_UNKNOWN_COMMAND = re.compile(r"No such command '([^']*)'")


@contextmanager
def hints_added() -> Iterator[None]:
    """Add hints to usage errors that are raised inside the block."""
    try:
        yield
    except Exception as error:  # typer does not export its class of unknown options
        context: Any = getattr(error, "ctx", None)
        option = getattr(error, "option_name", None)
        if context is not None and isinstance(option, str):
            takes_fields = any("--set" in parameter.opts for parameter in context.command.params)
            if hint := _option_hint(option, takes_fields):
                error.message += f"; {hint}"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
        elif context is not None and (command := _UNKNOWN_COMMAND.match(error.message)):  # type: ignore[attr-defined]
            if row := find(command[1], [f"command {context.command.name}", "command"]):
                error.message = f"{command[0]}; {row.hint(command[1])}."  # type: ignore[attr-defined]
            elif context.parent and error.message == f"{command[0]}.":  # type: ignore[attr-defined]
                names = ", ".join(context.command.list_commands(context))
                error.message = f"{command[0]}; {context.command_path} has: {names}."  # type: ignore[attr-defined]
        elif context is not None and getattr(getattr(error, "param", None), "metavar", None) == "JOB":
            error.message = NEW_JOB  # type: ignore[attr-defined]
        raise


def _option_hint(option: str, takes_fields: bool) -> str | None:
    if row := find(option, ["option"]):
        return row.hint(option)
    if not takes_fields:
        return None
    if row := find(option, ["field"]):
        is_place = row.ours is not None and _PLACE.fullmatch(row.ours)
        return f"set the field of the job: --set {row.ours}=VALUE" if is_place else row.hint(option)
    from d9d_core.job_file.job import JobConfig

    field = option.lstrip("-")
    if field.partition(".")[0] in JobConfig.model_fields:
        return f"set the field of the job: --set {field}=VALUE"
    return None
