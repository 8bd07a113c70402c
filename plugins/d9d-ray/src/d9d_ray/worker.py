"""Training function of a worker of Ray Train: one rank, in a thread that is not the main one."""

from __future__ import annotations

import argparse
import logging
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d9d_core.events import CheckpointSaved, ValuesLogged
from d9d_core.launcher import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from d9d_core.registry.policy import PluginPolicy
from d9d_core.subscriber import Subscribes, subscribe
from d9d_engine.job import Job
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.supervision.failure import FailureReporter

from d9d_ray.causes import Causes, fails_for_good
from d9d_ray.order import POINTER, STOP, TRAINS, Order, write_values

if TYPE_CHECKING:
    from ray.train import TrainContext

#: Seconds between two looks for a request to stop.
_PAUSE = 0.5


class PreemptedError(RuntimeError):
    """The run saved and stopped, because Ray is about to take a machine away; Ray starts the run again."""


def train_rank(values: Mapping[str, Any]) -> int:
    """Train as one rank of a job; Ray Train calls this function in each worker.

    An exception makes Ray start all workers again, up to the number of restarts; a returned status ends the run.

    Args:
        values: fields of the :class:`~d9d_ray.order.Order`.

    Returns:
        Exit status of the run: 0 if it finished, 75 if it was cancelled and saved, 2 if a restart would repeat the
        error.

    Raises:
        PreemptedError: the run saved and stopped before a preemption.
        Exception: any other failure.
    """
    from ray.train import get_context

    order, context = Order(**values), get_context()
    folder = Path(order.folder)
    if fails_for_good(folder):
        return EXIT_FAILED  # in the previous start, Ray ended ranks before they could return the failure
    # WARNING is Python's default; at INFO, which Ray sets, each report writes several lines to the log.
    for name in (None, "ray.train"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.chdir(order.working_directory)
    env = _environment(context)
    causes = Causes(folder, env.rank)
    causes.clear()
    try:
        if env.rank == 0:
            (folder / TRAINS).touch()
        status = _train(order, env, causes)
    except Exception as error:
        if causes.ends_for_good(error):
            return EXIT_FAILED
        raise
    finally:
        if env.rank == 0:
            (folder / TRAINS).unlink(missing_ok=True)
    if status == EXIT_STOPPED and not (folder / STOP).exists():
        raise PreemptedError("stopped and saved because Ray takes a machine away; the run continues from this step")
    return status


def _train(order: Order, env: ProcessEnv, causes: Causes) -> int:
    job = load(order, env.world_size)
    reporter = FailureReporter(f"rank {env.rank} on {env.node}", causes)
    interrupts = Interrupts()
    asked = partial(_request, Path(order.folder) / STOP)
    with (
        job.joined(env, reporter) as topology,
        # Only rank 0 looks for requests: one rank suffices, and rank 0 writes the cause into the run's directory.
        passed_on(asked, interrupts) if topology.is_main else nullcontext(),
        Reports(_report) as reports,
    ):
        trainer = job.build(topology=topology, observers=[reports], interrupts=interrupts, owning=True)
        outcome = trainer.train()
        reports.flush()
    return EXIT_FINISHED if outcome.status == "finished" else EXIT_STOPPED


def load(order: Order, world_size: int) -> Job:
    """Load the job of an order, with the plugins that ``d9d launch submit`` was told to load.

    Raises:
        D9dError: the job is invalid, or a plugin is missing on this machine.
    """
    options = argparse.ArgumentParser(exit_on_error=False)
    options.add_argument("--plugin", action="append", default=[], type=Path)
    options.add_argument("--no-plugins", action="store_true")
    options.add_argument("--strict-plugins", action="store_true")
    options.add_argument("--set", action="append", default=[])
    given = options.parse_args(order.options)
    policy = PluginPolicy(files=tuple(given.plugin), autoload=not given.no_plugins, strict=given.strict_plugins)
    return Job.load(order.job, overrides=given.set, policy=policy, world_size=world_size)


def _environment(context: TrainContext) -> ProcessEnv:
    """Rank and sizes of this worker, and the place where ranks meet, which rank 0 chooses. Collective."""
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    rank, world_size = context.get_world_rank(), context.get_world_size()
    local_world_size = context.get_local_world_size()
    place = None
    if rank == 0:
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            place = [host, free.getsockname()[1]]
    host, port = broadcast_from_rank_zero(place)
    node_rank = context.get_node_rank()
    # Ray does not tell the number of machines; if each has as many workers, the number follows from the sizes.
    num_nodes = max(-(-world_size // local_world_size), node_rank + 1)
    return ProcessEnv(
        rank=rank,
        world_size=world_size,
        local_rank=context.get_local_rank(),
        local_world_size=local_world_size,
        node=socket.gethostname(),
        launcher="torchrun",
        master=(host, port),
        node_rank=node_rank,
        num_nodes=num_nodes,
    )


def _request(stop: Path) -> str | None:
    """Source of a request to stop: ``d9d launch cancel`` or a preemption; ``None`` without a request."""
    if stop.exists():
        return "d9d launch cancel"
    return "a preemption" if _preempted() else None


def _preempted() -> bool:
    """Whether Ray has announced that it takes a machine of this run away."""
    # ray.train.get_preemption_info() waits for all ranks, and there is no public function for what this rank knows. If
    # the private one is missing, a preemption acts like a crash: the run continues from its newest checkpoint.
    try:
        from ray.train.v2._internal.execution.context import get_train_context

        return get_train_context().preemption_context.preemption_info is not None
    except (ImportError, AttributeError, RuntimeError):
        return False


@contextmanager
def passed_on(asked: Callable[[], str | None], interrupts: Interrupts, pause: float = _PAUSE) -> Iterator[None]:
    """Look for a request to stop in a thread inside the block, and pass it on to the run.

    Args:
        asked: returns the cause of a request, or ``None``.
        interrupts: stop requests of the run.
        pause: seconds between two looks.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(pause):
            if (cause := asked()) is not None:
                interrupts.request(cause)
                return

    thread = threading.Thread(target=watch, name="d9d-ray-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Reports(Subscribes):
    """Subscriber that reports each saved checkpoint, with the newest logged values, in a thread of its own.

    A report waits until all ranks report. Ranks learn at different steps that an asynchronous save has ended, so a
    report in the training thread could wait for a rank that waits for this one in a collective.

    Args:
        report: sends a mapping of the step, the checkpoint and the values; called once per save, in order.
    """

    def __init__(self, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._report = report
        self._values: Mapping[str, float] = {}
        self._saves: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="d9d-ray-reports", daemon=True)

    @subscribe(ValuesLogged)
    def values(self, event: ValuesLogged) -> None:
        """Keep the newest values."""
        self._values = event.values

    @subscribe(CheckpointSaved)
    def saved(self, event: CheckpointSaved) -> None:
        """Report a checkpoint."""
        report = event.report
        self._saves.put({**self._values, "step": report.step, "checkpoint": str(Path(report.location).absolute())})

    def flush(self) -> None:
        """Wait until all reports are sent. Collective over all ranks, because each report is."""
        self._saves.put(None)
        self._thread.join()

    def _send(self) -> None:
        while (values := self._saves.get()) is not None:
            self._report(values)

    def __enter__(self) -> Reports:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._saves.put(None)  # no wait after an error: other ranks may never report


def _report(values: Mapping[str, Any]) -> None:
    """Report a save to Ray. Collective over all ranks.

    Ray's checkpoint is a file with the path of d9d's checkpoint, which is not copied. If a report had no checkpoint of
    Ray, Ray would keep no values.
    """
    from ray.train import Checkpoint, get_context, report

    if get_context().get_world_rank() != 0:
        report(dict(values))
        return
    with tempfile.TemporaryDirectory(prefix="d9d-ray-") as folder:
        write_values(Path(folder) / POINTER, {name: values[name] for name in ("step", "checkpoint")})
        report(dict(values), checkpoint=Checkpoint.from_directory(folder))
