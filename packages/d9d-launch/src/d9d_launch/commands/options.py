"""Arguments and options that the commands of ``d9d launch`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Location = Annotated[Path, typer.Argument(metavar="JOB|RUN", help="Job file, or the run's directory.")]
Engine = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Engine of the submission; by default, the one that the run was submitted to."),
]
