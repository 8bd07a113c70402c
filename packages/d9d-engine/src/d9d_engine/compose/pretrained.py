"""Published weights to start from."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from d9d_core.components.instantiate import instantiate
from d9d_core.config import ModelConfig
from d9d_core.errors import CheckpointError
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.job_file.resolve import Parts, select
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec
from d9d_core.registry.registry import Registry
from d9d_core.tensors import local
from d9d_core.types import TensorSpec
from d9d_core.untrusted import Place
from d9d_weights.graph.base import Mapper
from d9d_weights.graph.expressions import TensorSource
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.format import KeepsFields
from d9d_weights.hugging_face.load import check_duplicates, load_tensors
from d9d_weights.sharding.agreement import on_all
from d9d_weights.sharding.model_tensors import model_tensors
from torch import nn

from d9d_engine.checkpoint.stored_model import merger_of, model_of
from d9d_engine.checkpoint.tensors import CheckpointTensors, is_checkpoint
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.progress import ByteBar


@dataclass(frozen=True)
class Pretrained:
    """Pretrained weights, checked against the model.

    Attributes:
        source: where they lie, opened.
        location: its path or address.
        graph: from their names and layouts to the model's; ``None`` if the weights are not wanted.
        others: files beside the weights that an export keeps, such as ``generation_config.json``; on the main rank.
        kept: fields of its ``config.json`` that an export keeps.
    """

    source: TensorSource
    location: str
    graph: StateGraph | None
    others: Mapping[str, bytes]
    kept: Mapping[str, Any]

    def summary(self) -> str:
        """Summary of what would be read, and what would be drawn anew."""
        if self.graph is None:
            return f"all drawn; sizes and tokenizer of {self.location}"
        anew = f"; drawn anew: {', '.join(sorted(self.graph.fresh))}" if self.graph.fresh else ""
        left = f"; left out: {listed(self.graph.left_out)}" if self.graph.left_out else ""
        return f"{len(self.graph.outputs)} tensors from {self.location} fit{anew}{left}"

    def load(self, stage: nn.Module, job: BaseJob, topology: Topology, note: Callable[[str], None]) -> None:
        """Fill the model's tensors from the files. Collective over all ranks.

        Raises:
            CheckpointError: something cannot be read, on any rank.
        """
        if self.graph is None:
            note(f"pretrained: sizes and tokenizer of {self.location}; all weights are drawn")
            return
        targets = {name: tensor for name, tensor in model_tensors(stage).items() if name in self.graph.outputs}
        started = time.perf_counter()
        once = job.loading.read == "once" and topology.world_size > 1
        here = {name: local(tensor).numel() for name, tensor in targets.items()}
        size = sum(count * self.graph.outputs[name].spec.dtype.itemsize for name, count in here.items())
        with ByteBar("loading", size, shown=topology.is_main) as bar:
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
            note(f"pretrained: not in it, drawn anew: {', '.join(sorted(self.graph.fresh))}")
        if self.graph.left_out:
            note(f"pretrained: left out, as the model has no place for it: {listed(self.graph.left_out)}")


@contextmanager
def pretrained_weights(
    job: BaseJob,
    selection: Parts,
    registry: Registry,
    stage: nn.Module,
    injected: frozenset[str],
    topology: Topology,
) -> Iterator[Pretrained | None]:
    """Open what ``model.pretrained`` names, and compare it with the model before anything is read or allocated.

    A training checkpoint is read as the model that its run would export, merged if it was fine-tuned. Collective over
    all ranks.

    Args:
        job: validated.
        selection: the job's records.
        registry: has the fine-tuning methods that a checkpoint may be of.
        stage: the model, on any device.
        injected: names of the tensors that the fine-tuning method added; they are in no checkpoint.
        topology: the ranks.

    Raises:
        CheckpointError: it is damaged or absent, or does not fit the model, on any rank.
    """
    spec = selection.model.spec
    if not isinstance(job.model, ModelConfig) or job.model.pretrained is None or not isinstance(spec, ModelSpec):
        yield None
        return
    assert spec.hugging_face is not None  # the config was resolved with it
    layout = spec.hugging_face.load()()
    location = job.model.pretrained

    def open_and_compare() -> Pretrained:
        if is_checkpoint(location):
            tensors = opened.enter_context(CheckpointTensors(location, "model/"))
            of_run, stored = model_of(tensors, registry)
            published = merger_of(tensors, registry) >> of_run.exporter(stored)
            graph = fitting(published >> layout.importer(job.model, stored), tensors)
            exported = _export_of(location)
            if exported is None:
                return Pretrained(tensors, tensors.location, graph, {}, {})
            return Pretrained(
                tensors, tensors.location, graph, *beside(opened.enter_context(ModelDirectory.open(exported)))
            )
        directory = opened.enter_context(ModelDirectory.open(location))
        graph = fitting(layout.importer(job.model, layout.config_from_json(directory.config())), directory)
        return Pretrained(directory, directory.location, graph, *beside(directory))

    def beside(directory: ModelDirectory) -> tuple[dict[str, bytes], Mapping[str, Any]]:
        others = directory.other_files() if topology.is_main else ()
        kept = layout.kept_fields(directory.config(), job.model) if isinstance(layout, KeepsFields) else {}
        return {name: directory.read_file(name) for name in others}, kept

    def fitting(mapper: Mapper, source: CheckpointTensors | ModelDirectory) -> StateGraph | None:
        if not job.loading.weights:
            return None
        try:
            graph = StateGraph(mapper, source.specs)
            graph.check(_expected(stage, injected))
            if topology.is_main:
                check_duplicates(graph, source)
        except CheckpointError as error:
            raise CheckpointError(f"model.pretrained: {source.location}: {error}") from error
        return graph

    with ExitStack() as opened:
        yield on_all(open_and_compare, None if topology.simulated else topology.world)


def listed(names: Sequence[str], shown: int = 5) -> str:
    """Names in a line: those that differ in numbers only, such as of layers, as one."""
    counts = Counter(re.sub(r"\d+", "*", name) for name in names)
    few = [name if count == 1 else f"{name} ({count} tensors)" for name, count in counts.most_common(shown)]
    return ", ".join(few) + (f" and {len(counts) - shown} more kinds" if len(counts) > shown else "")


def _export_of(location: str) -> Path | None:
    """Model that the run of a checkpoint has exported, with its tokenizer; ``None`` if it has not, or not here."""
    run = Place.of(location).run
    return run / "model" if run is not None and (run / "model" / "config.json").is_file() else None


def _expected(stage: nn.Module, injected: frozenset[str]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs_of(model_tensors(stage)).items() if name not in injected}


def job_state_graph(job: JobConfig, registry: Registry) -> StateGraph:
    """State graph from the weights that a job starts from to its model; without any, from its model to its export.

    Raises:
        CheckpointError: the weights do not fit, or the model has no published form.
    """
    selection = select(job, registry)
    spec = selection.model.spec
    with torch.device("meta"):
        stage = instantiate(selection.model, job.model, Stage())
    with pretrained_weights(job, selection, registry, stage, frozenset(), Topology()) as pretrained:
        if pretrained is not None and pretrained.graph is not None:
            return pretrained.graph
    if not isinstance(spec, ModelSpec) or spec.hugging_face is None:
        raise CheckpointError(f"model {selection.model.entry} has no Hugging Face layout")
    return StateGraph(spec.hugging_face.load()().exporter(job.model), specs_of(model_tensors(stage)))
