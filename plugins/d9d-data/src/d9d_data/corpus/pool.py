"""Pool of worker processes that tokenise shards.

The processes are started as separate programs rather than with ``multiprocessing``, which would run a user's script
without ``if __name__ == "__main__":`` again in each worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from d9d_core.errors import DataError, TrainingError

from d9d_data.corpus.plan import Shard
from d9d_data.corpus.worker import Setup, encode_shard

#: Default number of worker processes; the number of cores if that is smaller.
MOST_WORKERS = 8


def default_workers() -> int:
    """Default number of worker processes on this machine."""
    return min(MOST_WORKERS, os.cpu_count() or 1)


def tokenise_in_processes(setup: Setup, shards: Sequence[Shard], workers: int, advance: Callable[[int], None]) -> None:
    """Tokenise shards of a corpus in a pool of worker processes.

    Args:
        setup: settings for the workers.
        shards: shards to tokenise, started in this order.
        workers: number of processes.
        advance: called from several threads with the approximate number of bytes read since the last call.

    Raises:
        DataError: a file cannot be read or a document is malformed; raised for the first shard with such an error.
        TrainingError: a worker process died.
    """
    processes = [_start(workers) for _ in range(workers)]
    pending = deque(enumerate(shards))
    failures: dict[int, Exception] = {}

    def drive(process: subprocess.Popen[str]) -> None:
        # Shards start in order. When one fails, the shards before it are already being tokenised and report their
        # errors.
        while pending and not failures:
            try:
                index, shard = pending.popleft()
            except IndexError:
                return  # another thread took the last shard
            try:
                _tokenise(process, shard, advance)
            except (DataError, TrainingError) as error:
                failures[index] = error
                return

    threads = [threading.Thread(target=drive, args=(process,), daemon=True) for process in processes]
    try:
        for process in processes:
            _send(process, setup.encode())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for process in processes:
            _close(process)
    if failures:
        raise failures[min(failures)]


def _start(workers: int) -> subprocess.Popen[str]:
    # Each process starts a thread per core by default, too many for several processes.
    threads = max(1, (os.cpu_count() or 1) // workers)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "d9d_data.corpus.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={"RAYON_NUM_THREADS": str(threads)} | os.environ,
    )


def _tokenise(process: subprocess.Popen[str], shard: Shard, advance: Callable[[int], None]) -> None:
    assert process.stdout is not None
    _send(process, encode_shard(shard))
    left = shard.size
    for line in process.stdout:
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(answer["error"])
        read = left if "done" in answer else min(left, answer["read"])
        advance(read)
        left -= read
        if "done" in answer:
            return
    raise TrainingError(
        f"data.preparation_workers: a tokenising process died (exit status {process.wait()}); if memory ran out, use "
        "fewer processes; finished shards are kept, and 'data.preparation_workers: 0' tokenises in this process"
    )


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return  # the process died; reading its answer reports that


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue  # the process is dead, and some text was not sent to it
