"""Loading of pretrained weights."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from d9d_core.config import ModelConfig
from d9d_core.job_file.job import BaseJob
from d9d_core.job_file.resolve import Parts
from d9d_core.plugin import ModelSpec
from d9d_core.registry.registry import Registry
from d9d_core.tensors import local
from d9d_core.types import TensorSpec
from d9d_weights.checkpoint.pretrained import open_source
from d9d_weights.graph.expressions import TensorSource
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.hugging_face.format import KeepsFields
from d9d_weights.hugging_face.load import load_tensors
from d9d_weights.progress import ByteBar
from d9d_weights.sharding.agreement import on_all
from d9d_weights.sharding.model_tensors import model_tensors
from torch import nn

from d9d_engine.distributed.mesh import Topology


@dataclass(frozen=True)
class Pretrained:
    """Pretrained weights, checked against the model.

    Attributes:
        source: opened source of the tensors.
        location: path or address of the source.
        graph: mapping from the source's tensors to the model's; ``None`` if weights are not to be loaded.
        others: further files that an export keeps, such as ``generation_config.json``; on the main rank.
        kept: fields of the source's ``config.json`` that an export keeps.
    """

    source: TensorSource
    location: str
    graph: StateGraph | None
    others: Mapping[str, bytes]
    kept: Mapping[str, Any]

    def summary(self) -> str:
        """Summary of the tensors to be loaded, initialised at random or left out."""
        if self.graph is None:
            return f"all weights random; sizes and tokenizer of {self.location}"
        anew = f"; initialised at random: {', '.join(sorted(self.graph.fresh))}" if self.graph.fresh else ""
        left = f"; left out: {listed(self.graph.left_out)}" if self.graph.left_out else ""
        return f"{len(self.graph.outputs)} tensors from {self.location} fit{anew}{left}"

    def load(self, stage: nn.Module, job: BaseJob, topology: Topology, note: Callable[[str], None]) -> None:
        """Load the model's tensors. Collective over all ranks.

        Raises:
            CheckpointError: a file cannot be read, on any rank.
        """
        if self.graph is None:
            note(f"pretrained: sizes and tokenizer of {self.location}; all weights are initialised at random")
            return
        targets = {name: tensor for name, tensor in model_tensors(stage).items() if name in self.graph.outputs}
        started = time.perf_counter()
        once = job.loading.read == "once" and topology.world_size > 1
        here = {name: local(tensor).numel() for name, tensor in targets.items()}
        size = sum(count * self.graph.outputs[name].spec.dtype.itemsize for name, count in here.items())
        with ByteBar("loading weights", size, shown=topology.is_main) as bar:
            copies = topology.axes_group("dp_replicate", "dp_shard", "cp", "tp") if once else None
            load_tensors(
                self.graph,
                self.source,
                targets,
                threads=job.loading.threads,
                once=once,
                copies=copies,
                group=topology.world,
                on_bytes=bar.add,
            )
        seconds = time.perf_counter() - started
        read = f"{bar.done / 2**30:,.2f} GiB in {seconds:.1f} s, {bar.done / 2**30 / max(seconds, 1e-9):.2f} GiB/s"
        note(f"pretrained: {len(targets)} tensors from {self.location} ({read}{' here' if copies else ''})")
        if self.graph.fresh:
            note(f"pretrained: not in the source, initialised at random: {', '.join(sorted(self.graph.fresh))}")
        if self.graph.left_out:
            note(f"pretrained: left out, as the model has no such tensors: {listed(self.graph.left_out)}")


@contextmanager
def pretrained_weights(
    job: BaseJob,
    selection: Parts,
    registry: Registry,
    stage: nn.Module,
    injected: frozenset[str],
    topology: Topology,
) -> Iterator[Pretrained | None]:
    """Open the source that ``model.pretrained`` names, and compare it with the model before reading any tensor.

    A training checkpoint is read like the model that its run would export: adapters are merged. Collective over all
    ranks.

    Args:
        job: validated job.
        selection: plugin records of the job.
        registry: registry with the fine-tuning methods that a checkpoint may use.
        stage: model, on any device.
        injected: names of the tensors that the fine-tuning method added, which are in no source.
        topology: rank, device, meshes and process groups of this process.

    Raises:
        CheckpointError: the source is missing, damaged or does not fit the model, on any rank.
    """
    spec = selection.model.spec
    model = job.model
    if not isinstance(model, ModelConfig) or model.pretrained is None or not isinstance(spec, ModelSpec):
        yield None
        return
    assert spec.hugging_face is not None  # the config was resolved with it
    layout = spec.hugging_face.load()()

    def open_and_compare() -> Pretrained:
        source = open_source(model, layout, registry, opened, weights=job.loading.weights)
        graph = None
        if job.loading.weights:
            graph = source.graph(_expected(stage, injected), duplicates=topology.is_main)
        directory = source.directory
        if directory is None:
            return Pretrained(source.tensors, source.tensors.location, graph, {}, {})
        others = directory.other_files() if topology.is_main else ()
        kept = layout.kept_fields(directory.config(), model) if isinstance(layout, KeepsFields) else {}
        files = {name: directory.read_file(name) for name in others}
        return Pretrained(source.tensors, source.tensors.location, graph, files, kept)

    with ExitStack() as opened:
        yield on_all(open_and_compare, None if topology.simulated else topology.world)


def listed(names: Sequence[str], shown: int = 5) -> str:
    """List names in a line; names that differ in numbers only, such as layers, are listed once."""
    counts = Counter(re.sub(r"\d+", "*", name) for name in names)
    few = [name if count == 1 else f"{name} ({count} tensors)" for name, count in counts.most_common(shown)]
    return ", ".join(few) + (f" and {len(counts) - shown} more kinds" if len(counts) > shown else "")


def _expected(stage: nn.Module, injected: frozenset[str]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs_of(model_tensors(stage)).items() if name not in injected}
