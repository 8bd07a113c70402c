"""Command ``d9d data show``: prints the samples that a job trains on."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.job import JobFile
from d9d_core.registry.policy import PluginPolicy
from d9d_core.terminal.console import console_for
from d9d_core.untrusted import visible

from d9d_data.cli.samples import Sample, cut_off, marked, names_of_texts, samples_of, tokenizer_for

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Show the samples that a job trains on.",
)  # fmt: skip


@app.callback()
def data() -> None:
    """Group the commands of ``d9d data``. Without this callback, typer would drop the name of the single command."""


@app.command()
def show(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file: YAML, TOML or JSON.")],
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Samples to show.")] = 3,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job file; may be repeated."),
    ] = [],  # noqa: B006 - typer reads the default
    plugin: Annotated[
        list[Path], typer.Option("--plugin", metavar="FILE", help="A Python file to load as a plugin; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Print the first training samples. Tokens to learn are green, or between « and » without colours."""
    loaded = JobFile.load(job, overrides=overrides, policy=PluginPolicy(files=tuple(plugin)))
    pretrained = getattr(loaded.model, "pretrained", None)
    context = DataContext(
        seed=loaded.seed,
        batch_size=loaded.batch.size,
        microbatch_size=loaded.microbatch_size,
        cache_dir=loaded.run.cache,
        note=lambda text: typer.echo(visible(text), err=True),
        pretrained=pretrained,
    )
    stream = loaded.open_data(context)
    with tempfile.TemporaryDirectory() as directory:
        stream.save_assets(Path(directory))
        tokenizer = tokenizer_for(Path(directory), pretrained)
    if tokenizer is None:
        raise DataError(f"data: the dataset '{loaded.data.selector}' has no tokenizer to show samples as text")
    console = console_for()
    texts = len(names_of_texts(stream))
    for row, sample in zip(range(count * texts), samples_of(stream), strict=False):
        number = row // texts + 1
        console.print(f"=== {_title(number, sample)}", style="bold")
        console.print(marked(sample, tokenizer, brackets=not console.color_system), soft_wrap=True)


def _title(number: int, sample: Sample) -> str:
    learned = ""
    if sample.targets is not None:
        learned = f", {int((sample.targets >= 0).sum()):,} learned"
    elif sample.marks is not None:
        learned = f", {int(sample.marks.sum()):,} labelled"
    label = f", label {sample.label}" if sample.label else ""
    documents = int(sample.documents[-1]) + 1
    several = f", {documents} documents" if documents > 1 else ""
    name = f" {sample.name}" if sample.name else ""
    return f"sample {number}{name}: {len(sample.tokens):,} tokens{several}{learned}{label}{cut_off(sample.lost)}"
