"""``d9d new plugin``: writes skeletons of plugin packages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from d9d_core.terminal.console import console_for

from d9d_testing.scaffold.kinds import KINDS
from d9d_testing.scaffold.package import write_plugin

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(no_args_is_help=True)
def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of the distribution, such as acme-metrics.")],
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help=f"{', '.join([*KINDS][:-1])} or {[*KINDS][-1]}.")],
    directory: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Directory to write; by default ./NAME.")
    ] = None,
) -> None:
    """Write a complete, working plugin: declaration, implementation, tests with its conformance suite, and a job."""
    root = directory or Path(name)
    written = write_plugin(root, name, kind)
    console = console_for()
    for path in written:
        console.print(f"  {path}")
    console.print(f'\nnext:\n  cd {root}\n  pip install -e ".[test]"\n  pytest\n  d9d plugins conform {name}')
    console.print("fill in before a release: the addresses in pyproject.toml, and the name in LICENSE")
