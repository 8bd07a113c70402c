"""Process of one rank of a world."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Seconds after the time limit at which a rank exits by itself, in case the test's process is gone.
ORPHAN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Message that starts every rank of a world.

    The function is identified by file and name, because pytest's names of test modules cannot be imported.
    """

    module: str
    file: str
    qualname: str
    arguments: tuple[list[Any], dict[str, Any]]
    size: int
    backend: str
    timeout: float
    directory: Path
    environ: Mapping[str, str]

    def stack_file(self, rank: int) -> Path:
        """File to which a rank writes its stacks on request."""
        return self.directory / f"stack-{rank}"


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a rank: a packed value, or the text of a traceback."""

    value: Any = None
    error: str | None = None


def main(rank: int, launch: Launch, connection: Connection) -> None:
    """Join the process group, call the function, report, and leave when all ranks are done."""
    _enter(rank, launch)
    connection.send(_call(rank, launch))
    with contextlib.suppress(EOFError):
        connection.recv()  # waits until all ranks have reported: a rank that leaves early breaks its peers
    _leave()


def _enter(rank: int, launch: Launch) -> None:
    # Objects imported by the server are excluded from garbage collection: scanning them takes half a second each time,
    # and would copy the shared memory.
    gc.freeze()
    os.environ.clear()  # it is the environment of the first test that used a world
    os.environ.update(launch.environ)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(launch.size), LOCAL_WORLD_SIZE=str(launch.size))
    # By default gloo resolves the host name, which fails on machines without a network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    stacks = launch.stack_file(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.dump_traceback_later(launch.timeout + ORPHAN_SECONDS, exit=True)


def _call(rank: int, launch: Launch) -> Report:
    import torch
    from torch import distributed as dist

    from d9d_testing.world import wire

    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(launch.directory / "store"), launch.size)  # type: ignore[attr-defined]
        # The backend's limit is longer than the test's, so that the test reports a hang, with stacks.
        limit = timedelta(seconds=launch.timeout + ORPHAN_SECONDS)
        dist.init_process_group(launch.backend, store=store, rank=rank, world_size=launch.size, timeout=limit)
        _wait_for_all(store, launch.size)
        args, kwargs = wire.unpack(launch.arguments)
        return Report(value=wire.pack(_find(launch)(*args, **kwargs), "the returned value"))
    except BaseException as error:
        return Report(error=_describe(error))


def _wait_for_all(store: Any, size: int) -> None:
    """Wait until all ranks are connected: a rank that leaves the group at once would break connections in progress."""
    store.add("connected", 1)
    while store.add("connected", 0) < size:
        time.sleep(0.005)


def _describe(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _find(launch: Launch) -> Callable[..., Any]:
    value: Any = _module(launch)
    for part in launch.qualname.split("."):
        value = getattr(value, part)
    function: Callable[..., Any] = value
    return function


def _module(launch: Launch) -> Any:
    try:
        spec = importlib.util.find_spec(launch.module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == launch.file:
        return importlib.import_module(launch.module)
    # Under the name __main__, a script would run again in each rank.
    name = "__mp_main__" if launch.module == "__main__" else launch.module
    spec = importlib.util.spec_from_file_location(name, launch.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{launch.file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _leave() -> None:
    from torch import distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
