"""Commands of ``d9d state``; :mod:`d9d_weights.state.tensors`, which imports torch, implements them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from d9d_core.cli.options import AsJson, Files, NoPlugins, command_app, discover_plugins, echo

app = command_app("state", "Inspect, convert and compare checkpoints.")

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
