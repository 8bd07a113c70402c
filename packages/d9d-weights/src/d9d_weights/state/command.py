"""Commands of ``d9d state``; :mod:`d9d_weights.state.tensors`, which imports torch, implements them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.cli.options import AsJson, Files, NoPlugins, command_app, discover_plugins, echo

app = command_app("Inspect, convert, compare and publish checkpoints.")

Source = Annotated[str, typer.Argument(help="Model directory, .safetensors file, run, checkpoint, or fsspec address.")]


@app.command("show")
def state_show(
    source: Annotated[str, typer.Argument(help="Model directory, .safetensors file, checkpoint, run, or job file.")],
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a job's state graph here, as a Mermaid chart.")
    ] = None,
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """List tensors; for a job file, show how the tensors of its model map to the published layout."""
    from d9d_weights.state.tensors import show_state

    show_state(source, discover_plugins(plugin, no_plugins), picture, as_json)


@app.command("convert")
def state_convert(
    source: Source,
    target: Annotated[str, typer.Argument(help="Directory or fsspec address to write; Hugging Face layout.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Number format, such as bfloat16; kept by default.")
    ] = None,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest weight file, such as 5GB or 512MiB.")
    ] = "5GB",
    threads: Annotated[int, typer.Option(metavar="N", help="Number of reading threads.", min=1)] = 4,
    keep_from: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model directory to copy tokenizer, eos ids and generation config from."),
    ] = None,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """Convert a training checkpoint to a model directory, or a model to another number format or file size.

    Needs no GPU.
    """
    from d9d_weights.state.tensors import Conversion, convert_state, parse_dtype, parse_size

    asked = Conversion(source, target, parse_dtype(dtype), parse_size(shard_size), threads, keep_from)
    echo(convert_state(asked, discover_plugins(plugin, no_plugins)))


@app.command("push")
def state_push(
    source: Annotated[str, typer.Argument(help="Model directory, adapter directory, or run.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face Hub.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; private by default.")] = False,
    base_model: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="The Hub's name of an adapter's base model.")
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="Existing branch; main by default.")] = None,
    message: Annotated[str, typer.Option(metavar="TEXT", help="Message of the commit.")] = "Upload with d9d",
    yes: Annotated[bool, typer.Option("--yes", help="Upload without a question.")] = False,
) -> None:
    """List the files of an export, and upload them to the Hugging Face Hub after a question.

    'hf auth login' or the variable HF_TOKEN gives the token, which d9d neither reads nor stores.
    """
    from d9d_weights.state.push import Push, push_state

    def agreed() -> bool:
        if yes or not sys.stdin.isatty():
            return yes
        return typer.confirm("upload these files?")

    asked = Push(source, repository, public, revision, message, base_model)
    done = push_state(asked, agreed)
    echo(done or "nothing was uploaded; to upload without a question, add --yes")
    if done is None and not sys.stdin.isatty():
        raise typer.Exit(1)


@app.command("diff")
def state_diff(
    left: Source,
    right: Source,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="Largest deviation that counts as equal.", min=0.0)
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare the tensors of two checkpoints or models by name, shape, number format and values.

    The exit status is 1 if the tensors differ.
    """
    from d9d_weights.state.tensors import diff_states

    if not diff_states(left, right, tolerance, as_json):
        raise typer.Exit(1)
