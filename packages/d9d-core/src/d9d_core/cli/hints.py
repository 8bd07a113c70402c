"""Hints in errors of the command line: unknown commands, options and arguments, and commands without a job file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from d9d_core.words import find

#: How to get a job file; the command belongs to d9d-data.
NEW_JOB = "To write a job file: d9d new job --help"
_PLACE = re.compile(r"[a-z_]+(\.[a-z_]+)*")
_EXTRA = re.compile(r"Got unexpected extra argument\S* \((.*)\)")
_FIELD = re.compile(r"\+*([A-Za-z_][\w.\[\]]*=.*)")
_UNKNOWN_COMMAND = re.compile(r"No such command '([^']*)'")


@contextmanager
def hints_added() -> Iterator[None]:
    """Add hints to usage errors that are raised inside the block."""
    try:
        yield
    except Exception as error:  # typer does not export its class of errors about unknown options
        context: Any = getattr(error, "ctx", None)
        option = getattr(error, "option_name", None)
        if context is not None and isinstance(option, str):
            if hint := _option_hint(option, context):
                error.message += f"; {hint}"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
        elif context is not None and (command := _UNKNOWN_COMMAND.match(error.message)):  # type: ignore[attr-defined]
            if row := find(command[1], [f"command {context.info_name}", "command"]):
                error.message = f"{command[0]}; {row.hint(command[1])}."  # type: ignore[attr-defined]
            elif context.parent and error.message == f"{command[0]}.":  # type: ignore[attr-defined]
                names = ", ".join(context.command.list_commands(context))
                error.message = f"{command[0]}; {context.command_path} has: {names}."  # type: ignore[attr-defined]
        elif context is not None and (extra := _EXTRA.match(error.message)) and _takes_fields(context):  # type: ignore[attr-defined]
            fields = [field[1] for word in extra[1].split() if (field := _FIELD.fullmatch(word))]
            if fields:
                error.message += f"; write {' '.join(f'--set {field}' for field in fields)}"  # type: ignore[attr-defined]
        elif context is not None and getattr(getattr(error, "param", None), "metavar", None) == "JOB":
            error.message = NEW_JOB  # type: ignore[attr-defined]
        raise


def _takes_fields(context: Any) -> bool:
    """Whether the command overrides fields of a job file."""
    return any("--set" in parameter.opts for parameter in context.command.params)


def _name(context: Any) -> str:
    """Words of the command, such as ``new job``; empty for ``d9d`` itself."""
    return f"{_name(context.parent)} {context.info_name}".strip() if context.parent else ""


def _option_hint(option: str, context: Any) -> str | None:
    if row := find(option, [f"option {_name(context)}", "option"]):
        return row.hint(option)
    if not _takes_fields(context):
        return None
    if row := find(option, ["field"]):
        is_place = row.ours is not None and _PLACE.fullmatch(row.ours)
        return f"set the field of the job: --set {row.ours}=VALUE" if is_place else row.hint(option)
    from d9d_core.job_file.job import JobConfig

    field = option.lstrip("-")
    if field.partition(".")[0] in JobConfig.model_fields:
        return f"set the field of the job: --set {field}=VALUE"
    return None
