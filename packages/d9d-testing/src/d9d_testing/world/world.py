"""Test's side of a world: starts the ranks, collects their reports, and stops them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from d9d_testing.world import worker
from d9d_testing.world.errors import RankFailedError, RankHungError
from d9d_testing.world.worker import Launch, Report

#: Modules that the server imports before ranks are forked from it; absent ones are skipped. FSDP and DTensor import
#: ``torch._dynamo`` on first use. ``d9d_testing.layouts`` imports d9d-engine, which took each rank half a second; the
#: modules after it, which jobs with transformer models import, took each rank a further fifth of a second.
PRELOAD = (
    "pytest",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "d9d_testing.world.wire",
    "d9d_testing.world.worker",
    "d9d_testing.layouts",
    "d9d_engine.compose.training",
    "d9d_engine.compose.first_pass.build",
    "d9d_engine.plugin",
    "d9d_engine.subscribers.config",
    "d9d_data.config",
    "d9d_data.stream.text",
    "d9d_moe.experts.layer",
    "d9d_nn.causal_lm.task",
    "d9d_optim.plugin",
    "d9d_parallel.plugin",
    "d9d_qwen3.config",
    "d9d_qwen3.model",
)
#: Seconds in which other ranks may still report their own failures after the first one.
GRACE_SECONDS = 0.2
#: Seconds in which a rank must write its stacks, or leave after all ranks have reported.
LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class World:
    """Set of ``size`` processes with one process group, for tests.

    Attributes:
        size: number of ranks.
        timeout: seconds after which ranks that have not returned count as hanging.
        backend: backend of the process group.
    """

    size: int
    timeout: float = 60.0
    backend: str = "gloo"

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank; collective over all ranks.

        The ranks have this process's environment and working directory, torchrun's variables (``RANK``, ...), one
        thread each and the default process group. The function must be defined at the top level of its module (or be a
        static method of a class there). Arguments and results are plain data and tensors, which are copied.

        Returns:
            Result of each rank, in rank order.

        Raises:
            RankFailedError: ranks raised exceptions or died; contains their tracebacks.
            RankHungError: ranks did not return in time; contains the stack of every rank.
            TypeError: the function or an argument cannot be sent to another process.
        """
        __tracebackhide__ = True
        from d9d_testing.world import wire

        module, file = _home(function)
        arguments = (wire.pack(list(args), "args"), wire.pack(kwargs, "kwargs"))
        with tempfile.TemporaryDirectory(prefix="d9d-world-") as directory:
            launch = Launch(
                module=module,
                file=file,
                qualname=function.__qualname__,
                arguments=arguments,
                size=self.size,
                backend=self.backend,
                timeout=self.timeout,
                directory=Path(directory),
                environ=dict(os.environ),
            )
            with _started(launch) as ranks:
                reports = _collect(ranks, launch)
        return [wire.unpack(reports[rank].value) for rank in range(self.size)]


@dataclass(frozen=True, slots=True)
class _Rank:
    process: ForkServerProcess
    connection: Connection


def _home(function: Callable[..., Any]) -> tuple[str, str]:
    qualname = getattr(function, "__qualname__", repr(function))
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    if file is None or "<" in qualname:
        raise TypeError(
            f"{qualname} runs in other processes, which import it by name: define it at the top of a module"
        )
    return function.__module__, file


@contextmanager
def _started(launch: Launch) -> Iterator[list[_Rank]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    ranks: list[_Rank] = []
    try:
        for rank in range(launch.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=worker.main, args=(rank, launch, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()  # so that the pipe ends when the rank's process ends
            ranks.append(_Rank(process, ours))
        yield ranks
        for rank_ in ranks:
            rank_.connection.close()  # tells the rank that it may leave
        for rank_ in ranks:
            rank_.process.join(LEAVE_SECONDS)
    finally:
        for rank_ in ranks:
            rank_.process.kill()
            rank_.process.join()
            rank_.process.close()
            rank_.connection.close()


def _collect(ranks: list[_Rank], launch: Launch) -> dict[int, Report]:
    reports: dict[int, Report] = {}
    deadline = time.monotonic() + launch.timeout
    while missing := [rank for rank in range(launch.size) if rank not in reports]:
        waitables = [w for rank in missing for w in (ranks[rank].connection, ranks[rank].process.sentinel)]
        if not wait(waitables, max(0.0, deadline - time.monotonic())):
            break
        for rank in missing:
            if report := _receive(ranks[rank]):
                reports[rank] = report
                if report.error is not None:
                    # A failed rank stays until it is stopped, so failures that arrive now are not consequences of its
                    # end.
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    failures = {rank: report.error for rank, report in reports.items() if report.error is not None}
    if failures:
        raise RankFailedError(f"{len(failures)} of {launch.size} ranks failed in {launch.qualname}", failures)
    if missing:
        headline = (
            f"{len(missing)} of {launch.size} ranks did not return from {launch.qualname} in {launch.timeout:g} s"
        )
        raise RankHungError(headline, {rank: _stack(rank, ranks, launch, reports) for rank in range(launch.size)})
    return reports


def _receive(rank: _Rank) -> Report | None:
    try:
        if rank.connection.poll():
            report: Report = rank.connection.recv()
            return report
    except (EOFError, ConnectionResetError):
        rank.process.join(LEAVE_SECONDS)
    if rank.process.is_alive():
        return None
    code = rank.process.exitcode
    cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
    return Report(error=f"the process died: {cause}")


def _stack(rank: int, ranks: list[_Rank], launch: Launch, reports: dict[int, Report]) -> str:
    if rank in reports:
        return "returned"
    path = launch.stack_file(rank)
    pid = ranks[rank].process.pid
    if pid is None or not path.exists():
        return "had not started"
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + LEAVE_SECONDS
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.02)
        before, text = text, path.read_text()
        if text and text == before:
            break
    return text or "did not answer"
