"""Options and helpers that the commands of d9d-core and of other packages share."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from d9d_core.errors import JobError
from d9d_core.registry.policy import PluginPolicy
from d9d_core.untrusted import visible

if TYPE_CHECKING:
    from d9d_core.job import LoadedJob
    from d9d_core.registry.registry import Registry

    Loaded = TypeVar("Loaded", bound=LoadedJob)

JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="Job file: YAML, TOML or JSON.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job file; may be repeated.")
]
WorldSize = Annotated[int | None, typer.Option(metavar="N", help="Processes; by default, as the mesh needs.", min=1)]
Files = Annotated[
    list[Path], typer.Option("--plugin", metavar="FILE", help="A Python file to load as a plugin; may be repeated.")
]
NoPlugins = Annotated[bool, typer.Option("--no-plugins", help="Load no installed plugin.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict-plugins", help="Any problem with any plugin, such as a private or deprecated name, is an error."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory of a device that the job must fit into, such as 80GiB or 141GB."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def command_app(help_text: str | None = None) -> typer.Typer:
    """Create a typer application for a :class:`~d9d_core.plugin.CommandSpec`, whose errors ``d9d`` prints.

    Args:
        help_text: help of an application of several commands. The help of a single command is its docstring.
    """
    return typer.Typer(help=help_text, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def bytes_of(text: str | None) -> int | None:
    """Bytes of a size such as ``80GiB`` or ``141GB``; ``None`` for ``None``.

    Raises:
        JobError: the text is not a size.
    """
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(MB|GB|TB|MiB|GiB|TiB)", text.strip())
    if found is None or not float(found[1]):
        raise JobError(f"--memory: {text!r} is not a size; write a number and a unit, such as 80GiB or 141GB")
    return int(float(found[1]) * (1024 if "i" in found[2] else 1000) ** (" MGT".index(found[2][0]) + 1))


def policy_of(files: list[Path], no_plugins: bool, strict: bool) -> PluginPolicy:
    """Build the plugin policy (which plugins may be loaded) from the options of the command line."""
    return PluginPolicy(files=tuple(files), autoload=not no_plugins, strict=strict)


def load_job(
    kind: type[Loaded],
    job: Path,
    overrides: list[str],
    files: list[Path],
    no_plugins: bool,
    strict: bool,
    quiet: bool = False,
    world_size: int | None = None,
) -> Loaded:
    """Load a job file with the options of the command line, and print warnings about plugins that failed to load.

    ``world_size`` is used if the mesh has an axis ``auto``, or if the file has no mesh.

    Raises:
        JobError: the job file is invalid.
        PluginError: a plugin, or the plugin policy, is refused; see :func:`d9d_core.registry.loader.discover`.
    """
    loaded = kind.load(job, overrides=overrides, policy=policy_of(files, no_plugins, strict), world_size=world_size)
    if not quiet:
        warn_of_problems(loaded.registry)
    return loaded


def discover_plugins(files: list[Path], no_plugins: bool, strict: bool = False) -> Registry:
    """Registry of the installed plugins, restricted by the options of the command line."""
    from d9d_core.registry.loader import discover

    return discover(PluginPolicy.from_environment(os.environ) | policy_of(files, no_plugins, strict))


def warn_of_problems(registry: Registry) -> None:
    """Print a warning line for each plugin that failed to load."""
    for problem in registry.problems:
        say(f"warning: {problem} (see d9d doctor)")


def echo(text: str) -> None:
    """Print a line on standard output."""
    typer.echo(visible(text))


def say(text: str) -> None:
    """Print a line on standard error."""
    print(visible(text), file=sys.stderr)  # noqa: T201
