"""Composition of inference: what a job needs beside the model, the data and the layout of every job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from d9d_core import events as ev
from d9d_core.components.instantiate import instantiate
from d9d_core.config import ModelConfig
from d9d_core.data import DataStream
from d9d_core.errors import BuildError, DataError, JobError
from d9d_core.inference import (
    ROW,
    ContinuesRows,
    InferenceTask,
    JoinsPositions,
    ReadsModules,
    ReadsTexts,
    Writer,
    WritesText,
)
from d9d_core.job_file.inference import InferenceConfig
from d9d_core.job_file.resolve import InferenceSelection
from d9d_core.subscriber import Subscriber
from d9d_engine.compose.assemble import Assembly
from d9d_engine.compose.forward import ForwardModel, assemble_forward, build_forward
from d9d_engine.compose.root import Root
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.subscribers.event_bus import Events
from d9d_weights.checkpoint.tensors import CheckpointTensors, is_checkpoint
from d9d_weights.hugging_face.adapter import AdapterFormat
from d9d_weights.sharding.agreement import on_main

from d9d_inference.captures import Captures, module_names
from d9d_inference.forwards import Forwards, ManyForwards, OneForward
from d9d_inference.generation.decoder import Decoder
from d9d_inference.generation.tokenizer_files import ends_of_text, tokenizer_of
from d9d_inference.part_store import PartStore
from d9d_inference.position_parts import PositionParts
from d9d_inference.runner import Inference

#: Sections that have no say in what is written.
_FREE = ("run", "device", "mesh", "parallel", "pipeline", "kernels", "subscribers", "loading", "timeouts", "plugins")
#: Events that an inference job has.
_EVENTS = frozenset(
    {
        ev.JobConfigured, ev.ModelPlanned, ev.DataReady, ev.ModelReady, ev.InferenceStarts, ev.PackStarts, ev.PackEnds,
        ev.RowsWritten, ev.InferenceFinished, ev.InferenceStopped, ev.InferenceFailed,
    }
)  # fmt: skip


def build_inference(
    root: Root[InferenceConfig, InferenceSelection],
    observers: Sequence[Subscriber] = (),
    interrupts: Interrupts | None = None,
    owning: bool = False,
) -> Inference:
    """Compose everything an inference run needs. Collective over all ranks.

    Args:
        root: the job in this process.
        observers: subscribers besides those of the job.
        interrupts: requests to stop, which may have come already; by default, signals during the run.
        owning: own the run's directory before any data or weights are read, and not only when rows are written.

    Raises:
        D9dError: the job cannot run; the text says why.
    """
    job, selection, topology, note = root.job, root.selection, root.topology, root.note
    events = Events([*_subscribers(selection), *observers])
    events.emit(ev.JobConfigured(job))
    task: InferenceTask = instantiate(selection.task, job.task)
    check_columns(task)
    writer: Writer = instantiate(selection.writer, job.writer)
    _check_weights(job)
    assembly = assemble_forward(root)
    _check_peft(assembly)
    parts = _parts(job, task, topology)
    if isinstance(task, ReadsModules) and any(outcome.sequence_ranks > 1 for _, outcome in assembly.applied):
        raise BuildError(
            f"task: '{job.task.selector}' reads what modules inside of the model return, of which ranks of tp have "
            "parts only; leave mesh.tp out, and take more ranks along another axis"
        )
    events.emit(ev.ModelPlanned(job))
    reads = task.modules(module_names(assembly.all_stages)) if isinstance(task, ReadsModules) else ()

    store = PartStore(job.run.directory, writer)
    if owning:
        on_main(store.own, topology.world)

    inputs = task.text_inputs if isinstance(task, ReadsTexts) else "own"
    stream, seconds = root.open_data(one_pass=True, inputs=inputs)
    samples = check_data(stream, job)
    task.check(job.model, stream.facts)
    events.emit(ev.DataReady(stream))
    note(f"data: {samples:,} samples, {stream.facts['rows']:,} rows ({seconds})")

    if isinstance(task, WritesText):
        tokenizer = tokenizer_of(job, stream, f"task '{job.task.selector}'")
        task.use_text_of(None if tokenizer is None else tokenizer.decode)

    forward = build_forward(root, assembly, task.inputs)
    events.emit(ev.ModelReady(forward.model, assembly.stage_holders(topology)))
    count = sum(parameter.numel() for parameter in assembly.full_model.parameters())
    note(f"model: {count:,} parameters on {topology.device}")
    return Inference(
        job=job,
        topology=topology,
        task=task,
        forwards=_forwards(job, task, forward, reads, stream, topology),
        model=forward.model,
        least=assembly.pipeline.least_microbatches(job.microbatches),
        prefetcher=DevicePrefetcher(
            stream,
            topology.device,
            job.batch.prefetch,
            waiting_for=topology.watchdog.waiting_for,
            split=None if parts is None else parts.split,
        ),
        samples=samples,
        facts=stream.facts,
        store=store,
        record=_record(job, task, stream) if topology.is_main else {},
        interrupts=interrupts or Interrupts(),
        events=events,
        note=note,
        parts=parts,
    )


def _forwards(
    job: InferenceConfig,
    task: InferenceTask,
    forward: ForwardModel,
    reads: Sequence[str],
    stream: DataStream,
    topology: Topology,
) -> Forwards:
    """Forwards that a task asks for."""
    assembly = forward.assembly
    if not isinstance(task, ContinuesRows):
        captures = Captures(reads, assembly.stages, assembly.pipeline, topology)
        return OneForward(forward.executor, captures)
    stop = task.continuation.stop
    decoder = partial(
        Decoder,
        topology=topology,
        continuation=task.continuation,
        stop=ends_of_text(job, stream.facts) if stop is None else stop,
        logits=task.logits,
        nonfinite=job.nonfinite,
    )
    return ManyForwards(forward.executor, assembly.pipeline, topology, decoder, forward.holds_last)


def _parts(job: InferenceConfig, task: InferenceTask, topology: Topology) -> PositionParts | None:
    """Parts of samples on ranks of ``cp``; ``None`` where each rank has whole ones. Collective over all ranks.

    Raises:
        BuildError: the task needs all positions of a sample.
    """
    if topology.sizes["cp"] == 1:
        return None
    if not isinstance(task, JoinsPositions) or isinstance(task, ContinuesRows):
        raise BuildError(
            f"mesh.cp: inference task '{job.task.selector}' takes whole samples, of which ranks of cp have parts (see "
            "d9d_core.inference.JoinsPositions); leave mesh.cp out, and take more ranks along another axis"
        )
    return PositionParts(task, topology)


def check_columns(task: InferenceTask) -> None:
    """Check that a task's rows are numbered.

    Raises:
        JobError: its first column is another one.
    """
    if next(iter(task.columns), None) != ROW:
        raise JobError(f"task: the first column of {type(task).__name__} must be '{ROW}', the number of the row")


def check_data(stream: DataStream, job: InferenceConfig) -> int:
    """Check the data of an inference job, read once and in order: its number of samples.

    Raises:
        DataError: they are not, they are empty, or rows are longer than a sample or left out.
    """
    facts = stream.facts
    samples = facts.get("samples")
    if not isinstance(facts.get("rows"), int) or not isinstance(samples, int):
        raise DataError(
            f"data: '{job.data.selector}' cannot be read once and in order: it states no 'rows'; use another dataset"
        )
    if not samples:
        raise DataError("data: there are no samples; give other sources, or another split")
    cut = facts.get("cut_documents", 0)
    if isinstance(cut, int) and cut and job.too_long == "error":
        raise DataError(
            f"data.sequence_length: {cut:,} rows are longer than {facts.get('sequence_length')} positions; make it "
            "larger, or set 'too_long: cut' to use their beginnings only"
        )
    dropped = facts.get("dropped", 0)
    if isinstance(dropped, int) and dropped and job.too_long == "error":
        raise DataError(
            f"data: {dropped:,} records are left out, because they are longer than {facts.get('sequence_length')} "
            "positions or have no target, so rows would have other numbers than in the input; make "
            "data.sequence_length larger, take them out of the sources, or set 'too_long: cut' to go on without them"
        )
    return samples if job.limit is None else min(samples, job.limit)


def _check_weights(job: InferenceConfig) -> None:
    if not isinstance(job.model, ModelConfig) or job.model.pretrained is None:
        raise JobError(
            "model: inference needs trained weights; add 'model.pretrained:' with the directory of a run, of one of "
            "its checkpoints, or of a model in Hugging Face layout"
        )
    if not job.loading.weights:
        raise JobError("loading.weights: inference needs trained weights, and 'false' draws them; remove it")


def _subscribers(selection: InferenceSelection) -> list[Subscriber]:
    """Subscribers of the job.

    Raises:
        JobError: one observes training alone.
    """
    found: list[Subscriber] = []
    for chosen, config in selection.subscribers:
        subscriber: Subscriber = instantiate(chosen, config)
        if _EVENTS.isdisjoint(event for event, _ in subscriber.subscriptions()):
            raise JobError(f"{chosen.where}: {chosen.entry} observes training alone, so it would do nothing; remove it")
        found.append(subscriber)
    return found


def _check_peft(assembly: Assembly) -> None:
    """Check that a fine-tuning method brings weights of its own.

    Raises:
        JobError: it would only add what nothing has trained.
    """
    method: object = assembly.peft
    if method is None or (isinstance(method, AdapterFormat) and method.init_from is not None):
        return
    raise JobError(
        "peft: inference trains nothing, and the method starts from no adapter, so it would change nothing; remove it "
        "(a fine-tuned run in 'model.pretrained' is read with its adapter), or name an adapter with 'peft.init_from'"
    )


def _record(job: InferenceConfig, task: InferenceTask, stream: DataStream) -> Mapping[str, Any]:
    """Facts that decide which rows the output has: the job without its layout, the data at its start, the weights."""
    decides = {name: value for name, value in job.resolved().items() if name not in _FREE}
    assert isinstance(job.model, ModelConfig)
    assert job.model.pretrained is not None  # checked before
    adapter = getattr(job.peft, "init_from", None)
    weights = [weights_identity(location) for location in (job.model.pretrained, adapter) if isinstance(location, str)]
    return {"job": decides, "columns": dict(task.columns), "data": dict(stream.state()), "weights": weights}


def weights_identity(location: str) -> str:
    """Identity of weights: where they lie, and a digest of names, sizes and times of change of local files."""
    if is_checkpoint(location):
        with CheckpointTensors(location, "model/") as tensors:
            location = tensors.location
    if "://" in location:
        return location
    whole = Path(location)
    files = [whole] if whole.is_file() else sorted(path for path in whole.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(whole)), path.stat()) for path in files if path.suffix != ".tmp"]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return f"{location} {hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
