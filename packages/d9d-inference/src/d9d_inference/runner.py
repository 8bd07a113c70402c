"""Inference run: one pass over the data, forward only; rows are written while the next rows are computed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from d9d_core import events as ev
from d9d_core.config import speakable
from d9d_core.errors import TrainingError
from d9d_core.failures import exits_are_errors
from d9d_core.inference import InferenceTask
from d9d_core.job_file.inference import InferenceConfig
from d9d_core.types import Microbatch, Pack, State
from d9d_engine.distributed.determinism import deterministic_algorithms
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.subscribers.event_bus import Events
from d9d_weights.progress import SampleBar
from d9d_weights.sharding.agreement import on_main
from torch import Tensor, nn
from torch import distributed as dist

from d9d_inference.forwards import Forwards
from d9d_inference.part_store import PartStore, Standing
from d9d_inference.position_parts import PositionParts
from d9d_inference.row_thread import ROWS, KeptPack, RowThread

#: Seconds within which files written by another rank must become visible to the main rank.
_PATIENCE = 60.0
#: Names of the values about speed, which are added to the task's results.
_SPEED = ("seconds", "rows_per_second")


@dataclass(frozen=True, slots=True)
class InferenceOutcome:
    """Outcome of an inference run.

    Attributes:
        status: ``finished`` if all rows are written; ``stopped`` if the run was interrupted with its progress saved.
        samples: number of finished samples.
        rows: number of rows in the output file; 0 if stopped.
        values: the task's results over all rows; ``seconds`` and ``rows_per_second`` too, if this call computed rows.
    """

    status: Literal["finished", "stopped"]
    samples: int
    rows: int
    values: Mapping[str, float]


class Inference:
    """Runs a built inference job. The objects that it works with are public, so that each can be used alone.

    Made by :func:`d9d_inference.compose.build_inference`.

    Args:
        job: inference job.
        topology: rank, device, meshes and process groups of this process.
        task: task that makes rows from outputs.
        forwards: runs the model over microbatches.
        model: this rank's stages of the model, in evaluation mode.
        least: smallest number of microbatches with which the pipeline's schedule works.
        prefetcher: prefetcher of microbatches, at the start of the data.
        samples: number of samples to process.
        facts: facts that the data stream states, such as the number of ``rows``.
        store: storage of the rows.
        record: values that determine the output rows.
        interrupts: stop requests.
        events: event bus of the subscribers.
        note: prints a line.
        parts: split of samples over ``cp``; ``None`` if each rank has full samples.
    """

    def __init__(
        self,
        job: InferenceConfig,
        topology: Topology,
        task: InferenceTask,
        forwards: Forwards,
        model: nn.Module,
        least: int,
        prefetcher: DevicePrefetcher,
        samples: int,
        facts: State,
        store: PartStore,
        record: Mapping[str, object],
        interrupts: Interrupts,
        events: Events,
        note: Callable[[str], None],
        parts: PositionParts | None = None,
    ) -> None:
        self.job = job
        self.topology = topology
        self.task = task
        self.forwards = forwards
        self.model = model
        self._least = least
        self.prefetcher = prefetcher
        self.samples = samples
        self._facts = facts
        self.store = store
        self._record = record
        self.interrupts = interrupts
        self.events = events
        self.note = note
        self._parts = parts
        self._done = 0

    def run(self) -> InferenceOutcome:
        """Process the remaining data, write all rows, and join them to one file. Collective over all ranks.

        After Ctrl-C or SIGTERM on any rank, all ranks finish the same batch, write its rows, and return. A restarted
        run continues after these rows, on any number of ranks.

        Raises:
            JobError: the directory has results of another job.
            CheckpointError: rows could not be written or read.
            NonFiniteError: a row has NaN or infinity, and the job's ``nonfinite`` is ``error``.
            TrainingError: files written by other machines do not become visible to the main rank.
        """
        try:
            with exits_are_errors(), self.prefetcher, ExitStack() as held:
                on_main(lambda: held.enter_context(self.store.opened()), self.topology.world)
                held.enter_context(deterministic_algorithms(self.job.deterministic))
                return self._run()
        except BaseException as error:
            try:
                self.events.emit(ev.InferenceFailed(self._done, error))
            except Exception as second:
                error.add_note(f"besides, a subscriber to InferenceFailed raised {second!r}")
            raise

    def _run(self) -> InferenceOutcome:
        standing = Standing(**on_main(lambda: _fields(self.store.begin(self._record)), self.topology.world))
        self._done = standing.samples
        if standing.summary is not None:
            self.note(f"nothing left to do: {self.store.output} is complete")
            values = {name: float(value) for name, value in standing.summary["values"].items() if name not in _SPEED}
            return InferenceOutcome("finished", standing.samples, standing.summary["rows"], values)
        if standing.stream is not None:
            self.prefetcher.load_state(standing.stream)
            self.note(f"continues after sample {standing.samples:,} of {self.samples:,}")
        started = time.perf_counter()
        self.events.emit(ev.InferenceStarts(standing.samples, self.samples))
        with (
            self.interrupts,
            SampleBar("inference", self.samples, shown=self.topology.is_main) as bar,
            RowThread(self.task, self.store, self.job.nonfinite) as rows,
        ):
            bar.add(standing.samples)
            stopped = self._all_packs(rows, bar, standing)
            asked = self.interrupts.requested or "another rank"
        if stopped:
            self.note(f"{asked}: stopped after sample {self._done:,} of {self.samples:,}; start again to continue")
        outcome = self._finish(stopped, standing.samples, time.perf_counter() - started)
        done = ev.InferenceFinished if outcome.status == "finished" else ev.InferenceStopped
        self.events.emit(done(outcome.samples))
        return outcome

    def _all_packs(self, rows: RowThread, bar: SampleBar, standing: Standing) -> bool:
        """Compute the remaining packs of ``batch.size`` samples; return whether a stop request ended this early."""
        size = self.job.batch.size
        states: dict[int, object] = {}
        shown, stop = standing.samples, False
        with torch.inference_mode():
            for first in range(standing.samples, self.samples, size):
                if stop := self._asked_to_stop():
                    break
                self.topology.watchdog.phase("step", first // size)
                pack = self.prefetcher.next()
                states[first] = self.prefetcher.state()
                self.events.emit(ev.PackStarts(first, pack))
                kept = self._pack(first, pack)
                if kept is not None:
                    rows.put(kept)
                self.events.emit(ev.PackEnds(first))
                shown = self._advance(states, shown, bar)
        rows.drain()
        self.topology.watchdog.phase("checkpoint")
        self._wait_for_others(states, shown, bar)
        return stop

    def _pack(self, first: int, pack: Pack) -> KeptPack | None:
        """Run the model over this rank's share of a pack.

        Returns:
            Tensors that the task keeps, on one of the ranks with this share and the last stage; ``None`` on the others.
        """
        share = self._share
        mine = first + self.topology.data_parallel_rank * share
        real = max(0, min(share, self.samples - mine))
        # All ranks run as many microbatches as the first rank, which has the most samples.
        longest = min(share, int(self._facts["samples"]) - first)  # type: ignore[arg-type] # checked
        size = self.job.microbatch_size
        # Every pack has enough microbatches for the schedule; the last ones may hold fillers only.
        count = max(math.ceil(longest / size), self._least)
        chosen = [
            {**microbatch, ROWS: self._wanted(microbatch[ROWS], mine + index * size)}
            for index, microbatch in enumerate(pack[:count])
        ]
        kept: list[Mapping[str, Tensor]] = []
        # ranks along tp have the same outputs, so one of them writes
        writes = real and self.topology.coordinate["tp"] == 0

        def keep(outputs: Mapping[str, Tensor], microbatch: Microbatch) -> None:
            if not writes:
                return
            found = self.task.process(outputs, microbatch)
            whole = found if self._parts is None else self._parts.join(found)
            if whole is not None:
                kept.append(_to_host({**whole, ROWS: microbatch[ROWS]}))

        self.forwards.run(chosen, keep)
        if not kept:
            return None
        device = self.topology.device
        copied = torch.accelerator.current_stream(device).record_event() if device.type == "cuda" else None
        return KeptPack(mine, real, kept, copied)

    def _wanted(self, rows: Tensor, place: int) -> Tensor:
        """Return ``rows``, the indices of the samples' first rows, with -1 for samples beyond the requested number."""
        in_all, samples = int(self._facts[ROWS]), int(self._facts["samples"])  # type: ignore[arg-type] # checked
        if self.samples == samples:
            return rows
        if self._facts.get("packed"):  # samples that hold several rows are read in order
            numbers = torch.arange(place, place + len(rows), device=rows.device)
        else:
            numbers = rows // (in_all // samples)
        return torch.where(numbers < self.samples, rows, -1)

    @property
    def _share(self) -> int:
        return self.job.batch.size // self.topology.data_parallel_size

    def _asked_to_stop(self) -> bool:
        """Whether any rank was asked to stop. Collective over all ranks, with CPU tensors; called between batches."""
        asked = self.interrupts.requested is not None
        if self.topology.world is None:
            return asked
        flag = torch.tensor([float(asked)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.topology.world)
        return bool(flag)

    def _advance(self, states: dict[int, object], shown: int, bar: SampleBar) -> int:
        """On the main rank, record the batches whose rows are all written; return the number of finished samples."""
        if not self.topology.is_main:
            states.clear()
            return shown
        for first in list(states):
            end = min(first + self.job.batch.size, self.samples)
            starts = range(first, end, self._share)
            if not all(self.store.has(part, min(self._share, end - part)) for part in starts):
                break
            self.store.advance(end, self.samples, states.pop(first))  # type: ignore[arg-type] # states of a stream
            bar.add(end - shown)
            self._done = shown = end
            self.events.emit(ev.RowsWritten(end))
        return shown

    def _wait_for_others(self, states: dict[int, object], shown: int, bar: SampleBar) -> None:
        """Wait on the main rank until the rows that other machines have written are visible."""
        if self.topology.world is not None:
            dist.barrier(self.topology.world)
        deadline = time.monotonic() + _PATIENCE
        while states and self.topology.is_main:
            shown = self._advance(states, shown, bar)
            if states and time.monotonic() > deadline:
                raise TrainingError(
                    f"{self.store.directory}: rows written by other processes are not visible after {_PATIENCE:g} s; "
                    "all machines must share run.dir"
                )
            if states:
                time.sleep(0.1)

    def _finish(self, stopped: bool, before: int, seconds: float) -> InferenceOutcome:
        reached = self.samples

        def finish() -> list[object]:
            nonlocal reached
            if stopped:
                return [self._done, 0, {}]
            facts = [part for _, part in self.store.facts(reached)]
            names = facts[0].sums
            sums = {name: total(part.sums[name] for part in facts) for name in names}
            rows = sum(part.rows for part in facts)
            speed = (reached - before) / seconds * rows / reached
            values = {**self.task.finalize(sums), **dict(zip(_SPEED, (seconds, speed), strict=True))}
            self.store.finish(reached, {"rows": rows, "samples": reached, "values": speakable(values)})
            return [reached, rows, values]

        done, rows, values = on_main(finish, self.topology.world)
        return InferenceOutcome("stopped" if stopped else "finished", done, rows, values)


def _to_host(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Start copies to host memory, without waiting; they are complete once the device reaches this point."""
    copies = {}
    for name, tensor in kept.items():
        if tensor.device.type != "cuda":
            copies[name] = tensor.cpu()
            continue
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies[name].copy_(tensor, non_blocking=True)
    return copies


def _fields(standing: Standing) -> dict[str, object]:
    return {"samples": standing.samples, "stream": standing.stream, "summary": standing.summary}


def total(values: Iterable[float]) -> float:
    """Exact sum of floats, rounded once; with NaN or infinity, the plain sum."""
    numbers = list(values)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
