"""Composition of an inference run from a job."""

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

#: Sections of the job that do not affect the written rows.
_FREE = ("run", "device", "mesh", "parallel", "pipeline", "kernels", "subscribers", "loading", "timeouts", "plugins")
#: Events that an inference run emits.
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
    """Build an inference run with all its components. Collective over all ranks.

    Args:
        root: the job with its plugin records and the topology of this process.
        observers: subscribers in addition to the subscribers in the job.
        interrupts: stop requests, which may already have arrived; by default, signals received during the run.
        owning: take ownership of the run's directory before data or weights are read, not only while rows are written.

    Raises:
        D9dError: the job cannot run.
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
            f"task: '{job.task.selector}' reads outputs of modules inside the model, but ranks of tp have only parts "
            "of them; remove mesh.tp, and use more ranks along another axis"
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
    """Build the runner of a task's forwards: one forward per microbatch, or one per generated token."""
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
    """Build the splitter of samples over the ranks of ``cp``; ``None`` without ``cp``. Collective over all ranks.

    Raises:
        BuildError: the task needs full samples.
    """
    if topology.sizes["cp"] == 1:
        return None
    if not isinstance(task, JoinsPositions) or isinstance(task, ContinuesRows):
        raise BuildError(
            f"mesh.cp: inference task '{job.task.selector}' needs full samples, but ranks of cp have parts (see "
            "d9d_core.inference.JoinsPositions); remove mesh.cp, and use more ranks along another axis"
        )
    return PositionParts(task, topology)


def check_columns(task: InferenceTask) -> None:
    """Check that the first column of a task's rows is the row number.

    Raises:
        JobError: the first column is not ``row``.
    """
    if next(iter(task.columns), None) != ROW:
        raise JobError(
            f"task: columns of {type(task).__name__} must begin with '{ROW}', the row number; declare it first"
        )


def check_data(stream: DataStream, job: InferenceConfig) -> int:
    """Check that the data can be read once and in order; return the number of samples.

    Raises:
        DataError: the data cannot be read in one pass or is empty; or rows would be cut or dropped, and ``too_long`` is
            ``error``.
    """
    facts = stream.facts
    samples = facts.get("samples")
    if not isinstance(facts.get("rows"), int) or not isinstance(samples, int):
        raise DataError(
            f"data: '{job.data.selector}' cannot be read once and in order: it does not state its numbers of 'rows' "
            "and 'samples'; use another dataset"
        )
    if not samples:
        raise DataError("data: there are no samples; give other sources, or another split")
    cut = facts.get("cut_documents", 0)
    if isinstance(cut, int) and cut and job.too_long == "error":
        raise DataError(
            f"data.sequence_length: {cut:,} rows are longer than {facts.get('sequence_length')} positions; increase "
            "it, or set 'too_long: cut' to use only the first positions"
        )
    dropped = facts.get("dropped", 0)
    if isinstance(dropped, int) and dropped and job.too_long == "error":
        raise DataError(
            f"data: {dropped:,} records are dropped, as they are longer than {facts.get('sequence_length')} "
            "positions or have no target, so row numbers would differ from the input; increase data.sequence_length, "
            "remove these records from the sources, or set 'too_long: cut' to continue without them"
        )
    return samples if job.limit is None else min(samples, job.limit)


def _check_weights(job: InferenceConfig) -> None:
    if not isinstance(job.model, ModelConfig) or job.model.pretrained is None:
        raise JobError(
            "model: inference needs trained weights; set 'model.pretrained' to the directory of a run, of one of its "
            "checkpoints, or of a model in Hugging Face layout"
        )
    if not job.loading.weights:
        raise JobError("loading.weights: inference needs trained weights, which 'false' does not load; remove it")


def _subscribers(selection: InferenceSelection) -> list[Subscriber]:
    """Build the subscribers of the job.

    Raises:
        JobError: a subscriber observes training events only.
    """
    found: list[Subscriber] = []
    for chosen, config in selection.subscribers:
        subscriber: Subscriber = instantiate(chosen, config)
        if _EVENTS.isdisjoint(event for event, _ in subscriber.subscriptions()):
            raise JobError(f"{chosen.where}: {chosen.entry} observes training only, so it has no effect; remove it")
        found.append(subscriber)
    return found


def _check_peft(assembly: Assembly) -> None:
    """Check that a fine-tuning method, if the job has one, starts from the files of a trained adapter.

    Raises:
        JobError: the method has no adapter to start from.
    """
    method: object = assembly.peft
    if method is None or (isinstance(method, AdapterFormat) and method.init_from is not None):
        return
    raise JobError(
        "peft: inference trains nothing, and the method starts from no adapter, so it has no effect; remove it "
        "(a fine-tuned run in 'model.pretrained' is read with its adapter), or set 'peft.init_from' to an adapter"
    )


def _record(job: InferenceConfig, task: InferenceTask, stream: DataStream) -> Mapping[str, Any]:
    """Collect all values that determine the output rows.

    The job's sections without :data:`_FREE`, the output columns, the initial state of the data stream, and identities
    of the weights.
    """
    decides = {name: value for name, value in job.resolved().items() if name not in _FREE}
    assert isinstance(job.model, ModelConfig)
    assert job.model.pretrained is not None  # checked before
    adapter = getattr(job.peft, "init_from", None)
    weights = [weights_identity(location) for location in (job.model.pretrained, adapter) if isinstance(location, str)]
    return {"job": decides, "columns": dict(task.columns), "data": dict(stream.state()), "weights": weights}


def weights_identity(location: str) -> str:
    """Identity of weights: their location, and a digest of names, sizes and modification times of local files."""
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
