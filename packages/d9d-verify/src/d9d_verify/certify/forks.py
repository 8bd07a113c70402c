"""Starts the processes of a layout by forking a server that has imported the libraries, in 0.1 s per process."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from d9d_engine.launch.agent import rank_environments

from d9d_verify.run import Launch, launch_processes

#: Packages whose imported modules the server imports, too.
_PACKAGES = ("d9d_", "torch", "transformers")
#: Seconds in which other ranks may still fail by themselves after the first one.
_LAST_SECONDS = 2.0


def forking_launch(patience: float) -> Launch:
    """Return a launch function that forks processes on Linux, and starts new interpreters on other systems.

    Args:
        patience: seconds in which at least one more process of a layout must end; otherwise all are killed.
    """
    if sys.platform != "linux":  # on other systems, libraries do not work after a fork
        return launch_processes
    context = multiprocessing.get_context("forkserver")
    imported = sorted(name for name in sys.modules if name.startswith(_PACKAGES))
    context.set_forkserver_preload([*imported, "d9d_verify.worker"])

    def launch(directory: Path, ranks: int) -> str | None:
        with rank_environments(ranks) as environments:
            started: list[BaseProcess] = []
            try:
                for environ in environments:
                    process: BaseProcess = context.Process(target=_run, args=(directory, environ))
                    process.start()
                    started.append(process)
                failure = ended(started, patience)
            finally:
                for process in started:
                    process.kill()
                    process.join()
        stated = directory / "failure.txt"
        return stated.read_text().strip() if failure is not None and stated.exists() else failure

    return launch


def ended(processes: Sequence[BaseProcess], patience: float) -> str | None:
    """Wait until all processes have ended, or a failure or timeout occurs.

    Args:
        processes: started processes.
        patience: seconds within which at least one more process must end.

    Returns:
        Text of the first failure; ``None`` if there was none.
    """
    failure, running = None, {process.sentinel: process for process in processes}
    while running:
        ready = wait(list(running), timeout=patience if failure is None else _LAST_SECONDS)
        if not ready:
            return failure or f"no further process ended in {patience:g} s"
        for sentinel in ready:
            process = running.pop(sentinel)  # type: ignore[arg-type]  # sentinels are integers
            process.join()
            if process.exitcode and failure is None:
                signal = f"signal {-process.exitcode}"
                failure = "killed by " + signal if process.exitcode < 0 else f"exit status {process.exitcode}"
    return failure


def _run(directory: Path, environ: Mapping[str, str]) -> None:
    """Run one rank in the forked process, with its output redirected to a file."""
    os.environ.update(environ)
    output = os.open(directory / f"output-{environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    import torch

    from d9d_verify.worker import main

    torch.set_num_threads(1)
    main(directory)
