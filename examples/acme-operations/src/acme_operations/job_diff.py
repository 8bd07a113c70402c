"""Command ``d9d job_diff``: the fields in which two job files differ, defaults included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from d9d_core.job import JobFile
from d9d_core.terminal.console import console_for

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def job_diff(
    left: Annotated[Path, typer.Argument(help="Job file.")],
    right: Annotated[Path, typer.Argument(help="Job file to compare it with.")],
) -> None:
    """Print one line per field: its name, the value in the first file, the value in the second one."""
    first, second = (dict(_fields(JobFile.load(path).resolved())) for path in (left, right))
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    for name in names:
        console_for().print(f"{name}: {first.get(name, 'absent')} -> {second.get(name, 'absent')}", soft_wrap=True)
    console_for().print(f"{len(names)} fields differ")


def _fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of nested sections, by names with dots."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
