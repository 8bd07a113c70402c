"""Command, health check and job check."""

import typer
from d9d_core.errors import JobError
from d9d_core.health import Health
from d9d_core.job import JobFile

app = typer.Typer(help="Print a greeting.", pretty_exceptions_enable=False)


@app.command()
def greet(name: str = "world") -> None:
    typer.echo(f"hello {name}, from API 2")


def health() -> Health:
    return Health(True, "frozen and healthy", advice="")


def check(job: JobFile, world_size: int | None) -> None:
    if job.steps == 13:
        raise JobError("steps: 13 is unlucky; take another number")
    print(f"frozen_job: {job.steps} steps")
