"""Implementation of ``d9d state``: inspect, convert and compare checkpoints on any machine, with little memory."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from d9d_core.cli.options import say
from d9d_core.config import PluginConfig
from d9d_core.errors import CheckpointError
from d9d_core.job import JobFile
from d9d_core.job_file.job import Precision
from d9d_core.registry.registry import Registry
from d9d_core.terminal.console import console_for
from d9d_core.types import TensorSpec
from d9d_core.untrusted import visible
from pydantic import ValidationError
from rich.table import Table

from d9d_weights.checkpoint.pretrained import job_state_graph
from d9d_weights.checkpoint.stored_model import job_of, merger_of, model_of
from d9d_weights.checkpoint.tensors import CheckpointTensors, is_checkpoint
from d9d_weights.files.open import open_directory
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.graph import StateGraph
from d9d_weights.graph.mappers import Cast, Identity
from d9d_weights.graph.pictures import Line, graph_mermaid, graph_text, tensor_lines
from d9d_weights.hugging_face.convert import convert, deviation
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.format import HuggingFaceFormat, KeepsFields
from d9d_weights.model_card.card import MODEL_CARD
from d9d_weights.model_card.stored import card_of
from d9d_weights.progress import ByteBar, size_text

JOB_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_SIZE = re.compile(r"([0-9.]+)\s*([KMGT]?)(i?)B", re.IGNORECASE)


Tensors = ModelDirectory | CheckpointTensors


@contextmanager
def opened(location: str, scope: str = "") -> Iterator[Tensors]:
    """Open a model directory, a safetensors file, or a training checkpoint."""
    with CheckpointTensors(location, scope) if is_checkpoint(location) else ModelDirectory.open(location) as tensors:
        yield tensors


def show_state(location: str, registry: Registry, picture: Path | None, as_json: bool) -> None:
    """Print the tensors of a checkpoint, or the mapping between a job's model and its published form.

    Raises:
        D9dError: the location cannot be read.
    """
    if location.endswith(JOB_SUFFIXES):
        graph = job_state_graph(JobFile.load(location, registry=registry), registry)
        if picture is not None:
            picture.write_text(graph_mermaid(graph), "utf-8")
        text = {name: value.text() for name, value in graph.outputs.items()}
        sys.stdout.write((json.dumps(text, indent=1) if as_json else visible(graph_text(graph))) + "\n")
        return
    if picture is not None:
        raise CheckpointError(
            "--picture draws the mapping between a job's model and its published form; give a job file"
        )
    with opened(location) as tensors:
        _print_tensors(tensors.specs, as_json)


def _print_tensors(specs: Mapping[str, TensorSpec], as_json: bool) -> None:
    if as_json:
        described = {name: {"shape": list(s.shape), "dtype": _dtype_name(s.dtype)} for name, s in specs.items()}
        sys.stdout.write(json.dumps(described, indent=1) + "\n")
        return
    table = Table(box=None, header_style="bold")
    for title in ("tensor", "shape", "dtype", "count"):
        table.add_column(title, no_wrap=True)
    lines: list[Line] = tensor_lines(specs)
    for line in lines:
        table.add_row(line.name, str(list(line.spec.shape)), _dtype_name(line.spec.dtype), str(len(line.names)))
    console_for().print(table)
    numbers = sum(math.prod(spec.shape) for spec in specs.values())
    size = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())
    console_for().print(f"{len(specs)} tensors, {numbers:,} numbers, {size_text(size)}")


@dataclass(frozen=True)
class Conversion:
    """Request of ``d9d state convert``.

    Attributes:
        source: model directory or checkpoint.
        target: directory or fsspec address to write.
        dtype: dtype of floating-point tensors; ``None`` keeps their dtypes.
        shard_bytes: maximum bytes of a weight file.
        threads: number of threads that read.
        keep_from: model directory to copy tokenizer, generation config and token ids in ``config.json`` from.
    """

    source: str
    target: str
    dtype: torch.dtype | None
    shard_bytes: int
    threads: int
    keep_from: str | None = None


def convert_state(asked: Conversion, registry: Registry) -> str:
    """Convert a model directory or training checkpoint to a model in Hugging Face layout; returns a summary.

    Raises:
        CheckpointError: the model cannot be read, converted or written, or the target exists.
    """
    _refuse_taken(asked.target)
    with opened(asked.source, "model/") as tensors:
        mapper, config, others = _described(tensors, asked, registry)
        dtype = asked.dtype
        graph = StateGraph(mapper, tensors.specs)
        if dtype is not None:
            casts = (Cast(name, dtype) for name, spec in graph.specs.items() if spec.dtype.is_floating_point)
            graph = StateGraph(mapper >> Parallel(*casts, Identity()), tensors.specs)
        size = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in graph.specs.values())
        with ByteBar("converting", size) as bar:
            files = convert(graph, tensors, asked.target, config, others, asked.shard_bytes, asked.threads, bar.add)
    return f"{len(graph.outputs)} tensors, {size_text(size)} in {len(files)} files at {asked.target}"


def _refuse_taken(target: str) -> None:
    """Refuse a target that is not empty, because the conversion would replace it, even a run or the source itself."""
    if "://" in target:
        try:
            taken = bool(open_directory(target).names())
        except CheckpointError:  # absent; other errors are reported when it is written
            taken = False
    else:
        taken = Path(target).exists() and not (Path(target).is_dir() and not any(Path(target).iterdir()))
    if taken:
        raise CheckpointError(f"{target} exists: name a new directory, or remove {target} first")


def _described(
    tensors: Tensors, asked: Conversion, registry: Registry
) -> tuple[Mapper, dict[str, Any], dict[str, bytes]]:
    """Mapper, new ``config.json``, and other files of a conversion.

    A model's own README.md is not copied, because it describes the original model.
    """
    if isinstance(tensors, ModelDirectory):
        config = tensors.config()
        if asked.dtype is not None:
            if config.get("quantization_config"):
                raise CheckpointError(
                    f"{tensors.location} is quantized (quantization_config in config.json), so --dtype cannot convert "
                    "it; omit --dtype, or give the model's unquantized weights"
                )
            name = _dtype_name(asked.dtype)
            config |= {key: name for key in ("dtype", "torch_dtype") if key in config} or {"dtype": name}
        return Identity(), config, {name: tensors.read_file(name) for name in tensors.other_files()}
    job = job_of(tensors)
    merger = merger_of(tensors, registry)
    layout, model = model_of(tensors, registry)
    if asked.dtype is not None:
        dtype = _dtype_name(asked.dtype)
    else:
        try:
            dtype = Precision.model_validate(job.get("precision", {})).parameters
        except ValidationError as error:
            raise CheckpointError(
                f"{tensors.location}: precision in its manifest is invalid: {error}; give --dtype"
            ) from error
    kept, others = _taken_over(job, asked.keep_from, layout, model)
    mapper, config = merger >> layout.exporter(model), {**layout.config_json(model, dtype), **kept}
    card = card_of(tensors, config, StateGraph(mapper, tensors.specs).specs, say)
    return mapper, config, {**others, MODEL_CARD: card.text()}


def _taken_over(
    job: Mapping[str, Any], keep_from: str | None, layout: HuggingFaceFormat, model: PluginConfig
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Fields of ``config.json`` and files that are copied from another model directory to the converted model."""
    if keep_from is None:
        origin = job["model"].get("pretrained")
        if isinstance(origin, str):  # not opened, because an untrusted checkpoint names it
            say(f"note: the run started from {origin!r}; use --keep-from to copy its tokenizer, eos ids and the like")
        return {}, {}
    with ModelDirectory.open(keep_from) as source:
        kept = layout.kept_fields(source.config(), model) if isinstance(layout, KeepsFields) else {}
        return kept, {name: source.read_file(name) for name in source.other_files()}


def diff_states(left: str, right: str, tolerance: float, as_json: bool) -> bool:
    """Compare the tensors of two checkpoints and print the differences. Returns whether they agree.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    with ExitStack() as stack:
        a, b = (stack.enter_context(opened(location)) for location in (left, right))
        rows = list(_differences(a, b))
    differing = [row for row in rows if row["difference"] != "numbers" or not row["largest"] <= tolerance]
    if as_json:
        sys.stdout.write(json.dumps({"tensors": len(rows), "different": differing}, indent=1) + "\n")
    else:
        table = Table(box=None, header_style="bold")
        for title in ("tensor", "difference", left, right, "largest deviation"):
            table.add_column(title, no_wrap=True)
        for row in differing:
            largest = "" if row["largest"] is None else f"{row['largest']:.3g}"
            table.add_row(row["name"], row["difference"], row["left"], row["right"], largest)
        if differing:
            console_for().print(table)
        same = len(rows) - len(differing)
        console_for().print(f"{len(rows)} tensors: {same} equal within {tolerance:g}, {len(differing)} different")
    return not differing


def _differences(a: Tensors, b: Tensors) -> Iterator[dict[str, Any]]:
    both = [name for name in a.specs if name in b.specs]
    size = sum(math.prod(a.specs[name].shape) * a.specs[name].dtype.itemsize for name in both)
    with ByteBar("comparing", size) as bar:
        for name in [*a.specs, *(name for name in b.specs if name not in a.specs)]:
            here, there = a.specs.get(name), b.specs.get(name)
            row = {"name": name, "left": _form(here), "right": _form(there), "largest": None}
            if here is None or there is None:
                yield row | {"difference": "only on the right" if here is None else "only on the left"}
            elif here.shape != there.shape:
                yield row | {"difference": "shape"}
            else:
                largest = deviation(name, a, b, bar.add)
                kind = "numbers" if here.dtype == there.dtype else "dtype"
                yield row | {"difference": kind, "largest": largest}


def _form(spec: TensorSpec | None) -> str:
    return "-" if spec is None else f"{list(spec.shape)} {_dtype_name(spec.dtype)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_dtype(text: str | None) -> torch.dtype | None:
    """Parse the name of a floating-point dtype, such as ``bfloat16``.

    Raises:
        CheckpointError: the text is not the name of a floating-point dtype.
    """
    found = None if text is None else getattr(torch, text, None)
    if text is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise CheckpointError(f"--dtype: '{text}' is not a floating-point format, such as float32, bfloat16, float16")
    return found


def parse_size(text: str) -> int:
    """Parse a size: ``5GB`` is 5 * 10**9, ``2GiB`` is 2 * 2**30.

    Raises:
        CheckpointError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not 0 < number < math.inf:
        raise CheckpointError(f"--shard-size: '{text}' is not a size, such as 5GB or 512MiB")
    power = " KMGT".index(match[2].upper() or " ")
    return max(1, int(number * (1024 if match[3] else 1000) ** power))
