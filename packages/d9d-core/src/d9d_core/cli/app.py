"""Command line ``d9d``. Other packages declare their commands as records; a command imports its code when it runs."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Annotated, Any

import typer

from d9d_core.cli.group import OpenGroup, PluginGroup
from d9d_core.cli.options import (
    AsJson,
    Files,
    JobPath,
    Memory,
    NoPlugins,
    Overrides,
    Strict,
    WorldSize,
    bytes_of,
    discover_plugins,
    load_job,
    say,
    warn_of_problems,
)
from d9d_core.errors import D9dError
from d9d_core.failures import describe

DOCUMENTATION = (
    "Documentation: docs/index.md of the repository; 'uv run mkdocs serve' shows it as a site. "
    "docs/words.md lists the words of other tools, such as learning_rate, with d9d's."
)
#: Numbers of system errors about a file or directory that cannot be read or written, printed without traceback.
_OF_THE_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR)
app = typer.Typer(
    name="d9d",
    cls=PluginGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distributed PyTorch training as an ecosystem of small plugins.",
    epilog=DOCUMENTATION,
)
plugins = typer.Typer(cls=OpenGroup, no_args_is_help=True, help="List installed plugins and check that they load.")
app.add_typer(plugins, name="plugins")


def run() -> None:
    """Run the command line; print a D9dError, or an OSError about an unusable file or directory, without traceback.

    Errors go to standard error. The exit status is then the error's ``exit_code``, or 2 for an OSError.
    """
    # Let waiting threads sleep; torch reads the variable when it is imported. The default, threads that spin while they
    # wait, halves the speed of training on a machine with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # plugins' texts may hold characters that the encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    # Do not call app(): typer would replace the hook that prints tracebacks.
    command = typer.main.get_command(app)
    try:
        command()
    except D9dError as error:
        say(describe(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _OF_THE_PLACE or error.filename is None:
            raise
        say(f"error: {error.filename}: {error.strerror}")
        sys.exit(2)


def _own_commands() -> set[str]:
    """Names of d9d-core's commands; a command of a group has two words."""
    group: Any = typer.main.get_command(app)
    inner = {f"plugins {name}" for name in group.commands["plugins"].commands}
    return {*group.commands, *inner}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"d9d-core {version('d9d-core')}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Distributed PyTorch training as an ecosystem of small plugins."""


@app.command()
def check(
    job: JobPath,
    world_size: WorldSize = None,
    memory: Memory = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Check a job without a GPU or memory for the model. Without d9d-engine, checks that need tensors are left out."""
    from d9d_core.cli.check import check_job
    from d9d_core.job import JobFile

    size = bytes_of(memory)
    file = load_job(JobFile, job, overrides, plugin, no_plugins, strict_plugins, world_size=world_size)
    check_job(file, world_size, size)


@app.command()
def schema(plugin: Files = [], no_plugins: NoPlugins = False) -> None:  # noqa: B006
    """Print the JSON schema of job files that use the installed plugins, for editors."""
    import json

    from d9d_core.job_file.schema import job_schema

    registry = discover_plugins(plugin, no_plugins)
    warn_of_problems(registry)
    with redirect_stdout(sys.stderr):  # plugins may print when they are imported
        schema = job_schema(registry, skipped=lambda error: say(f"warning: {error}; the schema omits this component"))
    typer.echo(json.dumps(schema, indent=1))


@app.command()
def doctor(
    verbose: Annotated[bool, typer.Option("--verbose", help="Also list plugins and missing libraries.")] = False,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """Check that this machine is ready and all plugins load. Exit status 1 if not."""
    from d9d_core.cli.health import examine

    if not examine(discover_plugins(plugin, no_plugins), _own_commands(), verbose):
        raise typer.Exit(1)


@plugins.command("list")
def plugins_list(as_json: AsJson = False, plugin: Files = [], no_plugins: NoPlugins = False) -> None:  # noqa: B006
    """List every name that a job file can use."""
    from d9d_core.cli.plugins import list_records

    registry = discover_plugins(plugin, no_plugins)
    warn_of_problems(registry)
    list_records(registry, as_json)


@plugins.command("show")
def plugins_show(
    name: Annotated[str, typer.Argument(help="A name from `d9d plugins list`, distribution/name, or a distribution.")],
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """Show a record: its fields, defaults, requirements and origin; or list the records of a distribution."""
    from d9d_core.cli.plugins import show_records

    show_records(discover_plugins(plugin, no_plugins), name, as_json)


@plugins.command("check")
def plugins_check(
    name: Annotated[
        str | None, typer.Argument(help="A distribution, or a file given with --plugin; all plugins by default.")
    ] = None,
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Annotated[
        bool, typer.Option("--strict-plugins", help="The use of a deprecated name is a problem, too.")
    ] = False,
) -> None:
    """Load every reference of plugins, and report broken references, private names and deprecated names.

    Exit status 1 if there is any problem; the use of a deprecated name is a problem only with --strict-plugins.
    """
    from d9d_core.cli.plugins import check_plugins

    if not check_plugins(discover_plugins(plugin, no_plugins), name, as_json, _own_commands(), strict_plugins):
        raise typer.Exit(1)
