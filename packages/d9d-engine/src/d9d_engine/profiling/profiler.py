"""Profiler of training steps: records the last steps of each cycle and writes a trace on every rank."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from d9d_core.job_file.sections.profiling import Profiling
from torch.profiler import ProfilerAction, ProfilerActivity, profile, supported_activities

from d9d_engine.distributed.logs import rank_logger
from d9d_engine.distributed.mesh import Topology
from d9d_engine.profiling.ranges import PREFIX, Ranges
from d9d_engine.profiling.summary import STEP, Span, table, time_by_kind

#: Largest number of allocations and releases in a memory snapshot; the latest ones are kept.
_MEMORY_EVENTS = 100_000


class StepProfiler:
    """Profiler that writes a Chrome trace of each cycle on each rank.

    The window of a cycle is its warm-up steps and its recorded steps. Traces are
    ``<run>/profile/step-N/rank-R-<coordinate>.json.gz``. The step number alone decides whether a step is recorded: all
    ranks record the same steps, and a resumed run continues the cycles. If a resumed run starts inside a window, this
    window is skipped. Outside of windows, and without a config, the profiler has no cost. Traces are compressed in a
    thread; if a trace cannot be written, a warning is printed.

    Args:
        config: steps and contents to record; ``None`` disables the profiler.
        topology: rank, device, meshes and process groups of this process.
        directory: directory of the run's traces.
        note: prints a line.
        ranges: profiler ranges, enabled while the profiler runs.
    """

    def __init__(
        self,
        config: Profiling | None,
        topology: Topology,
        directory: Path,
        note: Callable[[str], None],
        ranges: Ranges,
    ) -> None:
        self._config = config
        self._topology = topology
        self._directory = directory
        self._note = note
        self.ranges = ranges
        self._profile: profile | None = None
        self._done = 0  # steps of the run done so far
        self._first = 0  # steps done before the first recorded step
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[str | None]] = []

    def check(self, step: int, total_steps: int) -> None:
        """Warn if no step from ``step`` to ``total_steps`` would be recorded."""
        if (config := self._config) is None:
            return
        first = config.every - config.warmup - config.active
        begins = step + (first - step) % config.every
        if begins + config.warmup >= total_steps and step < total_steps:
            self._note(
                f"warning: profiling: nothing will be recorded: the next recorded step is {begins + config.warmup + 1} "
                f"of {total_steps}; lower profiling.every, which is {config.every}"
            )

    def before(self, step: int) -> None:
        """Start recording if step ``step`` (0-based) is the first of its cycle's window."""
        config = self._config
        if config is None or self._profile is not None:
            return
        if step % config.every != config.every - config.warmup - config.active:
            return
        self._done, self._first = step, step + config.warmup
        if config.memory:
            self._record_memory("all")
        # Without this, Kineto prints a line on standard error for each window.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = {ProfilerActivity.CPU}
        if self._topology.device.type != "cpu":
            activities |= set(supported_activities())  # type: ignore[no-untyped-call]
        self._profile = profile(
            activities=activities,
            schedule=partial(_action, config.warmup, config.active),
            on_trace_ready=self._ready,
            record_shapes=config.record_shapes,
            with_stack=config.with_stack,
            profile_memory=config.memory,
            acc_events=True,
        )
        self.ranges.on = True
        self._profile.start()

    def after(self, done: int) -> None:
        """Advance after a step and its events; ``done`` steps are done. Writes the trace at the end of a window."""
        if self._config is None:
            return
        if self._profile is not None:
            self._done = done
            self._profile.step()
            if done % self._config.every == 0:
                self._stop()
        self._tell(wait=False)

    def close(self) -> None:
        """Stop recording, write the recorded steps, and wait until all traces are written."""
        if self._profile is not None:
            self._stop()
        self._tell(wait=True)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _stop(self) -> None:
        running, self._profile = self._profile, None
        assert running is not None
        self.ranges.on = False
        try:
            running.stop()
        except RuntimeError as error:  # the device may have failed
            self._lost(error)
        if self._config is not None and self._config.memory:
            self._record_memory(None)

    def _ready(self, finished: profile) -> None:
        """Pass a recorded trace to the writing thread."""
        try:
            self._hand_over(finished)
        except (OSError, RuntimeError) as error:  # a failed trace must not end the run
            self._lost(error)

    def _hand_over(self, finished: profile) -> None:
        folder = self._directory / f"step-{self._done}"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{_rank_name(self._topology)}.json.gz"
        raw = target.with_name(f".{target.stem}")
        # Export in this thread, because the profiler's library supports one session at a time.
        finished.export_chrome_trace(str(raw))
        snapshot = self._memory_snapshot() if self._config is not None and self._config.memory else None
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="d9d-traces")
        self._pending.append(
            self._pool.submit(self._write, finished, raw, target, snapshot, self._done, self._done - self._first)
        )

    def _write(self, finished: profile, raw: Path, target: Path, snapshot: Any, done: int, steps: int) -> str | None:
        """Compress a trace; on the main rank, return the table of times."""
        _compress(raw, target)
        if snapshot is not None:
            memory = raw.with_suffix(".memory")
            # torch's function for this writes a pickle file.
            memory.write_text(json.dumps(snapshot, default=str), encoding="utf-8")
            _compress(memory, target.with_name(f"{_rank_name(self._topology)}.memory.json.gz"))
        if not (self._topology.is_main and steps):
            return None
        times, total = time_by_kind(spans_of(finished), steps)
        which = f"step {done}" if steps == 1 else f"steps {done - steps + 1} to {done}"
        where = f"{self._topology.device}, {_rank_name(self._topology)}"
        return f"{table(times, total, steps, f'profile of {which} ({where})')}\n  traces: {target.parent}"

    def _tell(self, wait: bool) -> None:
        """Print the time tables that the writing thread has finished."""
        while self._pending and (wait or self._pending[0].done()):
            try:
                text = self._pending.pop(0).result()
            except Exception as error:  # a failed trace must not end the run
                self._lost(error)
            else:
                if text is not None:
                    self._note(text)

    def _lost(self, error: Exception) -> None:
        text = f"profiling: a trace up to step {self._done} is lost: {error}"
        if self._topology.is_main:
            self._note(f"warning: {text}")
        else:  # notes of other ranks are not printed
            rank_logger("profiling", self._topology).warning("%s", text)

    def _record_memory(self, enabled: str | None) -> None:
        # This private function is the only way to a history of allocations; without it there are no snapshots.
        record = getattr(torch.cuda.memory, "_record_memory_history", None)
        if self._topology.device.type == "cuda" and record is not None:
            record(enabled=enabled, max_entries=_MEMORY_EVENTS)

    def _memory_snapshot(self) -> Any:
        snapshot = getattr(torch.cuda.memory, "_snapshot", None)  # private, too
        return snapshot() if self._topology.device.type == "cuda" and snapshot is not None else None


def spans_of(finished: profile) -> list[Span]:
    """Spans of the operations, kernels and ranges that a finished profiler recorded."""
    return [
        Span(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.device_type.name != "CPU",
            bool(event.is_user_annotation) or event.name.startswith((PREFIX, STEP)),
        )
        for event in finished.events() or ()  # type: ignore[no-untyped-call]
    ]


def _action(warmup: int, active: int, number: int) -> ProfilerAction:
    """Action for torch's profiler (warm up, record, save) in step ``number`` of a window."""
    if number < warmup:
        return ProfilerAction.WARMUP
    if number < warmup + active - 1:
        return ProfilerAction.RECORD
    return ProfilerAction.RECORD_AND_SAVE if number == warmup + active - 1 else ProfilerAction.NONE


def _rank_name(topology: Topology) -> str:
    """Name of a rank in file names, such as ``rank-3-dp_replicate1-dp_shard1``, without axes of size one."""
    shown = [f"{axis}{at}" for axis, at in topology.coordinate.items() if topology.sizes[axis] > 1]
    return "-".join([f"rank-{topology.rank}", *shown])


def _compress(raw: Path, target: Path) -> None:
    part = target.with_name(f".{target.name}")
    with raw.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as compressed:
        shutil.copyfileobj(source, compressed, 1 << 20)
    part.replace(target)
    raw.unlink()
