"""Reader of packs (the microbatches of a step), which are built in this process or in worker processes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
import torch
from d9d_core.errors import DataError, TrainingError
from d9d_core.interpreter import children_import_as_here
from d9d_core.types import Pack
from torch.utils.data import DataLoader, Dataset

# Packs that each worker builds ahead.
_AHEAD = 2


#: Pack as arrays, before they become tensors. Arrays are sent between processes as bytes; tensors would be sent as
#: shared memory, each with an open file, and containers limit both.
Arrays = Sequence[Mapping[str, npt.NDArray[Any]]]


#: Number of tokens lost to truncation by each document of each row of a microbatch.
Lost = Sequence[Sequence[int]]


class PackSource(Protocol):
    """Source that builds any pack (the microbatches of a step) of one rank; can be pickled."""

    def pack_at(self, consumed: int) -> Arrays:
        """Build the pack that follows ``consumed`` samples of all ranks."""
        ...


@runtime_checkable
class TellsLosses(Protocol):
    """Source that knows the number of tokens that documents lost to truncation, for ``d9d data show``."""

    def lost_at(self, consumed: int) -> Sequence[Lost]:
        """Number of tokens lost by each document in the rows of :meth:`PackSource.pack_at`, by microbatch."""
        ...


class PackReader:
    """Reader of consecutive packs of a source. The packs do not depend on the number of worker processes.

    Worker processes start at the first read, and keep running when reading continues at another position.

    Args:
        source: source of the packs.
        step: number of samples of a pack, over all ranks.
        workers: number of processes that build packs ahead; 0 builds each pack in this process when it is read.
    """

    def __init__(self, source: PackSource, step: int, workers: int) -> None:
        self._source = source
        self._workers = workers
        self._places = _Places(step)
        self._loader: DataLoader[Arrays] | None = None
        self._packs: Iterator[Arrays] = iter(())
        self._expected: int | None = None

    def read(self, consumed: int) -> Pack:
        """Read the pack that follows ``consumed`` samples.

        Raises:
            DataError: a worker process failed.
            TrainingError: a worker process died; jobs are restarted after this error.
        """
        if not self._workers:
            return _tensors(self._source.pack_at(consumed))
        try:
            if consumed != self._expected:
                self._start(consumed)
            arrays = next(self._packs)
        except RuntimeError as error:
            self.close()
            # The loader's message begins so for an exception in a worker; any other RuntimeError means that a worker is
            # gone.
            raised = str(error).startswith("Caught ")
            kind, what = (DataError, "failed") if raised else (TrainingError, "died")
            raise kind(
                f"data.workers: a process that builds packs {what} ({error}); if memory ran out, use fewer "
                "workers; 'data.workers: 0' builds packs in the training process and shows the original error"
            ) from error
        self._expected = consumed + self._places.step
        return _tensors(arrays)

    def close(self) -> None:
        """End the worker processes; a later read starts new processes."""
        self._loader, self._packs, self._expected = None, iter(()), None

    def _start(self, consumed: int) -> None:
        self._places.first = consumed
        if self._loader is None:
            self._loader = DataLoader(
                _Packs(self._source),
                batch_size=None,
                sampler=self._places,
                num_workers=self._workers,
                collate_fn=_as_it_is,
                prefetch_factor=_AHEAD,
                persistent_workers=True,
                # Spawn: forked workers would inherit the accelerator's context, and locks of threads that they lack.
                multiprocessing_context="spawn",
                worker_init_fn=partial(_follow_training_process, os.getpid()),
                # The loader draws a seed for its workers. Drawing it from the default generator would change the
                # training.
                generator=torch.Generator(),
            )
        # In the main thread, the loader would install a SIGCHLD handler that can raise between any two statements.
        with children_import_as_here(), ThreadPoolExecutor(1) as thread:
            self._packs = thread.submit(_start_workers, self._loader).result()


class _Places:
    """Sampler for torch's data loader: the endless sequence of numbers of consumed samples, one number per pack."""

    def __init__(self, step: int) -> None:
        self.first = 0
        self.step = step

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first, self.step)


class _Packs(Dataset[Arrays]):
    """Dataset for torch's data loader, which builds packs by a :class:`PackSource`."""

    def __init__(self, source: PackSource) -> None:
        self._source = source

    def __getitem__(self, consumed: int) -> Arrays:
        return self._source.pack_at(consumed)


def _tensors(arrays: Arrays) -> Pack:
    return [{name: torch.from_numpy(values) for name, values in microbatch.items()} for microbatch in arrays]


def _as_it_is(pack: Any) -> Any:
    return pack


def _start_workers(loader: DataLoader[Arrays]) -> Iterator[Arrays]:
    """Start the workers with SIGINT and SIGTERM blocked; runs in a thread of its own.

    Ctrl-C reaches all processes of a terminal, and Slurm and systemd send SIGTERM to all processes. The training
    process decides how to stop, and needs its workers until then.
    """
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    return iter(loader)


def _follow_training_process(parent: int, _worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        threading.Thread(target=_end_with_training_process, args=(parent,), daemon=True).start()
    else:  # on macOS, the loader ends a worker with SIGTERM
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_with_training_process(parent: int) -> None:
    """End this process when the training process sends SIGTERM or is gone.

    The loader's own check reads the parent's id only after the worker has started, seconds later, when the parent may
    be gone already.
    """
    while os.getppid() == parent:
        asked = signal.sigtimedwait([signal.SIGTERM], 1.0)
        if asked is not None and asked.si_pid == parent:
            break
    os._exit(0)
