"""``d9d``: commands, options, exit codes. Each command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from d9d_core.cli.group import PluginGroup
from d9d_core.errors import D9dError, JobError
from d9d_core.plugin.policy import PluginPolicy
from d9d_core.topology.failure import Failure
from d9d_core.topology.place import Place

app = typer.Typer(
    name="d9d",
    cls=PluginGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distributed PyTorch training as an ecosystem of small plugins.",
)
plugins = typer.Typer(no_args_is_help=True, help="What is installed, and whether it is sound.")
app.add_typer(plugins, name="plugins")
state = typer.Typer(no_args_is_help=True, help="Look at checkpoints, convert them, compare them.")
app.add_typer(state, name="state")

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file: YAML, TOML or JSON.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job file; may be repeated.")
]
Files = Annotated[
    list[Path], typer.Option("--plugin", metavar="FILE", help="A Python file to load as a plugin; may be repeated.")
]
NoPlugins = Annotated[bool, typer.Option("--no-plugins", help="Load no installed plugin.")]
Strict = Annotated[bool, typer.Option("--strict-plugins", help="Any problem with any plugin is an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line. A known error is one message on standard error and exit status 2 (1 once training runs)."""
    try:
        app()
    except D9dError as error:
        failure = Failure.of(error)
        _say(failure.text)
        sys.exit(failure.exit_code)


def _policy(files: list[Path], no_plugins: bool, strict: bool) -> PluginPolicy:
    return PluginPolicy(files=tuple(files), autoload=not no_plugins, strict=strict)


def _load(
    job: Path, overrides: list[str], files: list[Path], no_plugins: bool, strict: bool, quiet: bool = False
) -> Any:
    from d9d_core.job import Job

    loaded = Job.load(job, overrides=overrides, policy=_policy(files, no_plugins, strict))
    if not quiet:
        _warn(loaded.registry)
    return loaded


def _discover(files: list[Path], no_plugins: bool, strict: bool) -> Any:
    from d9d_core.plugin.loader import discover

    return discover(PluginPolicy.from_environment(os.environ) | _policy(files, no_plugins, strict))


def _warn(registry: Any) -> None:
    for problem in registry.problems:
        _say(f"warning: {problem} (see d9d doctor)")


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


def _own_commands() -> set[str]:
    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


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
def train(
    job: JobFile,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
    nproc: Annotated[
        str | None, typer.Option(metavar="N", help="Start this many processes here; 'auto': as many as the mesh needs.")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="How often to start all processes again after one died; implies --nproc.", min=0
        ),
    ] = None,
) -> None:
    """Train. Continues from the newest checkpoint of the run, if there is one."""
    from d9d_core.launch.process import running

    place = Place.from_environment(os.environ)
    if nproc is not None or max_restarts is not None:
        if place.launcher is not None:
            raise JobError(f"--nproc, --max-restarts: {place.launcher} has started this process; tell it instead")
        loaded = _load(job, overrides, plugin, no_plugins, strict_plugins)
        options = [word for option in overrides for word in ("--set", option)]
        options += [word for file in plugin for word in ("--plugin", str(file))]
        options += ["--no-plugins"] * no_plugins + ["--strict-plugins"] * strict_plugins
        raise typer.Exit(_launch(loaded, ["train", str(job), *options], nproc or "auto", max_restarts or 0))
    with running(place, os.environ) as process:
        loaded = _load(job, overrides, plugin, no_plugins, strict_plugins, quiet=process.repeats)
        loaded.check_names(place.world_size)
        from d9d_core.topology.mesh import describe_rank

        # A process that is alone says why it failed on its way out, as every command does.
        alone = place.launcher is None
        teller = None if alone else process.teller(describe_rank(loaded.mesh.sizes(), place.rank))
        with loaded.joined(place, teller) as topology:
            with _start_up():
                trainer = loaded.build(topology=topology)
            outcome = trainer.train()
        if outcome.status == "finished" and topology.is_main:
            typer.echo(f"finished {outcome.step} steps; results in {loaded.run.directory}")


@contextmanager
def _start_up() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("during start-up; nothing was trained") from None


def _launch(job: Any, arguments: list[str], nproc: str, restarts: int) -> int:
    from d9d_core.launch.agent import Launch

    if nproc != "auto" and not nproc.isdecimal():
        raise JobError(f"--nproc: '{nproc}' is neither a number nor auto")
    processes = job.mesh.world_size if nproc == "auto" else int(nproc)
    job.check_names(processes)

    def name_of(rank: int) -> str:
        from d9d_core.topology.mesh import describe_rank

        return describe_rank(job.mesh.sizes(), rank)

    return Launch(("-m", "d9d_core", *arguments), processes, restarts, name_of).run()


@app.command()
def check(
    job: JobFile,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="Processes; by default, what the mesh needs.", min=1)
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Check a job without a GPU or memory for the model."""
    from d9d_core.cli.report import print_plan

    loaded = _load(job, overrides, plugin, no_plugins, strict_plugins)
    print_plan(loaded, loaded.plan(world_size))


@app.command()
def explain(
    job: JobFile,
    overrides: Overrides = [],  # noqa: B006
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Show what a job does: where each part comes from, what was applied in which order, and why."""
    from d9d_core.cli.report import print_explanation

    loaded = _load(job, overrides, plugin, no_plugins, strict_plugins)
    print_explanation(loaded, loaded.plan())


@app.command()
def verify(
    job: JobFile,
    layout: Annotated[
        list[str],
        typer.Option(metavar="LAYOUT", help="Such as dp_shard=2:fsdp; may be repeated; the job's own by default."),
    ] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps to compare.", min=1)] = 4,
    max_ranks: Annotated[int, typer.Option(metavar="N", help="Most processes for the job's own layout.", min=1)] = 8,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Compare layouts of a job, scaled down, with one process: every gradient. Exit status 1 if one deviates."""
    from d9d_core.cli.verify import verify_job

    loaded = _load(job, overrides, plugin, no_plugins, strict_plugins)
    if not verify_job(loaded, layout, steps, max_ranks, as_json):
        raise typer.Exit(1)


@app.command()
def schema(plugin: Files = [], no_plugins: NoPlugins = False) -> None:  # noqa: B006
    """Print the JSON schema of a job file over what is installed, for editors."""
    import json

    from d9d_core.config.schema import job_schema

    registry = _discover(plugin, no_plugins, strict=False)
    _warn(registry)
    schema = job_schema(registry, skipped=lambda error: _say(f"warning: {error}; left out of the schema"))
    typer.echo(json.dumps(schema, indent=1))


@app.command()
def doctor(plugin: Files = [], no_plugins: NoPlugins = False) -> None:  # noqa: B006
    """Is this machine ready, and are all plugins sound? Exit status 1 if not."""
    from d9d_core.cli.health import examine

    if not examine(_discover(plugin, no_plugins, strict=False), _own_commands()):
        raise typer.Exit(1)


@plugins.command("list")
def plugins_list(as_json: AsJson = False, plugin: Files = [], no_plugins: NoPlugins = False) -> None:  # noqa: B006
    """List every name that a job file can use."""
    from d9d_core.cli.plugins import list_records

    registry = _discover(plugin, no_plugins, strict=False)
    _warn(registry)
    list_records(registry, as_json)


@plugins.command("show")
def plugins_show(
    name: Annotated[str, typer.Argument(help="A name from `d9d plugins list`, or distribution/name.")],
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """Show a record: its fields, defaults, requirements and origin."""
    from d9d_core.cli.plugins import show_records

    show_records(_discover(plugin, no_plugins, strict=False), name, as_json)


@plugins.command("check")
def plugins_check(
    name: Annotated[
        str | None, typer.Argument(help="A distribution, or a file given with --plugin; all by default.")
    ] = None,
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """Load everything that plugins refer to and report what is broken. Exit status 1 if anything is."""
    from d9d_core.cli.plugins import check_plugins

    if not check_plugins(_discover(plugin, no_plugins, strict=False), name, as_json, _own_commands()):
        raise typer.Exit(1)


StatePlace = Annotated[
    str, typer.Argument(help="Model directory, .safetensors file, run, checkpoint, or fsspec address.")
]


@state.command("show")
def state_show(
    place: Annotated[str, typer.Argument(help="Model directory, .safetensors file, checkpoint, run, or job file.")],
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a job's state graph here, as a Mermaid chart.")
    ] = None,
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """List tensors; of a job file, show how its model and the published layout correspond."""
    from d9d_core.cli.state import show_state

    show_state(place, _discover(plugin, no_plugins, strict=False), picture, as_json)


@state.command("convert")
def state_convert(
    source: StatePlace,
    target: Annotated[str, typer.Argument(help="Directory or fsspec address to write; Hugging Face layout.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Number format, such as bfloat16; kept by default.")
    ] = None,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest weight file, such as 5GB or 512MiB.")
    ] = "5GB",
    threads: Annotated[int, typer.Option(metavar="N", help="Reads at a time.", min=1)] = 4,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """Write a model anew: from a training checkpoint, in another number format, in files of another size. No GPU."""
    from d9d_core.cli.state import Conversion, convert_state, parse_dtype, parse_size

    asked = Conversion(source, target, parse_dtype(dtype), parse_size(shard_size), threads)
    typer.echo(convert_state(asked, _discover(plugin, no_plugins, strict=False)))


@state.command("diff")
def state_diff(
    left: StatePlace,
    right: StatePlace,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="Largest deviation that counts as equal.", min=0.0)
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare names, shapes, number formats and numbers. Exit status 1 if they differ."""
    from d9d_core.cli.state import diff_states

    if not diff_states(left, right, tolerance, as_json):
        raise typer.Exit(1)
