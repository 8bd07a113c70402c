"""Joining of a job's processes, for training and inference. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from d9d_core.errors import JobError
from d9d_core.failures import exits_are_errors
from d9d_core.job import LoadedJob
from d9d_core.plugin import ScheduleSpec
from d9d_core.registry.manifest import Manifest
from d9d_core.terminal.console import folded
from d9d_core.untrusted import visible

from d9d_engine.machines import require_whole_groups
from d9d_engine.process_env import ProcessEnv
from d9d_engine.supervision.failure import FailureReporter

if TYPE_CHECKING:
    from d9d_engine.compose.root import Root
    from d9d_engine.distributed.mesh import Topology


def print_note(text: str) -> None:
    """Print a note, such as the start of a long operation, as one line on standard output."""
    with suppress(OSError):  # a full disk or a closed terminal must not end the run
        print(folded(visible(text)), flush=True)  # noqa: T201 - console output is the purpose


def silent(_text: str) -> None:
    """Discard a note: all ranks do the same work, and only the main rank prints about it."""


class JoinsProcesses(LoadedJob):
    """Base class of jobs that run as one process or several; joins the processes."""

    @classmethod
    def _started(cls) -> int:
        return ProcessEnv.from_environment(os.environ).world_size

    def _only_transfers(self) -> bool:
        """Whether pipeline transfers are the only communication inside a step, and the schedule orders them."""
        if self.pipeline is None or not self.mesh.pp == self.mesh.world_size > 1:
            return False
        spec = self.registry.find("schedule", self.pipeline.name).spec
        return isinstance(spec, ScheduleSpec) and spec.ordered_transfers

    def _log_level(self) -> str | None:
        """Lowest level of log lines that are shown; ``None`` if the job sets none."""
        return None

    @contextmanager
    def composed(self, note: Callable[[str], None], topology: Topology | None) -> Iterator[Root[Any, Any]]:
        """Resolve the job's components in this process, and yield the root from which they are built.

        Names and layout are checked before torch is imported, capabilities once the device is known.

        Args:
            note: prints a warning or a line about a long operation; called on the main rank only.
            topology: rank and process groups of this process; ``None`` for a single process.

        Raises:
            D9dError: the job cannot run.
        """
        if topology is None and (started := self._started()) > 1 and self.mesh.world_size == started:
            raise JobError(
                f"this process is one of {started} that a launcher started, and has not joined the other ranks; write\n"
                "    with job.joined() as topology:\n"
                "        job.build(topology=topology)"
            )
        selection = self.check_layout(1 if topology is None else topology.world_size)
        from d9d_engine.compose.root import compose_root
        from d9d_engine.distributed.determinism import prepare_determinism
        from d9d_engine.distributed.devices import choose_device
        from d9d_engine.distributed.mesh import Topology

        if self.deterministic:
            prepare_determinism(self.device)
        if topology is None:
            topology = Topology(sizes=self.mesh.sizes(), device=choose_device(self.device), views=self.views())
        with self.source.document.placing(), exits_are_errors():
            yield compose_root(self, selection, self.registry, topology, note if topology.is_main else silent)

    @contextmanager
    def joined(self, env: ProcessEnv | None = None, reporter: FailureReporter | None = None) -> Iterator[Topology]:
        """Join the job's processes inside the block. Collective over all ranks.

        Args:
            env: rank and sizes of this process; by default, read from the environment variables of the launcher.
            reporter: tells the user why this rank failed, before the exception propagates out of the block; by
                default, the exception only propagates.

        Raises:
            D9dError: the mesh does not fit the number of processes or machines, this rank has no device, ranks have
                different jobs or versions, or some ranks did not arrive.
        """
        env = env or ProcessEnv.from_environment(os.environ)
        if self.mesh.world_size != env.world_size:
            self.check_layout(env.world_size)  # always raises; the error lists all problems of the layout
        if env.num_nodes * env.local_world_size == env.world_size:  # all machines have equal numbers of processes
            require_whole_groups(self.mesh.tp, env.num_nodes, env.local_world_size)
        from d9d_engine.distributed.determinism import prepare_determinism
        from d9d_engine.distributed.devices import device_of, load_kernels_eagerly, share_hardware_queues
        from d9d_engine.distributed.logs import log_lines
        from d9d_engine.distributed.mesh import Topology
        from d9d_engine.distributed.world import joined
        from d9d_engine.supervision.identity import Identity

        if self.deterministic:
            prepare_determinism(self.device)
        if self.mesh.pp > 1:
            load_kernels_eagerly(self.device)
        if self._only_transfers():
            share_hardware_queues(self.device)
        device = device_of(self.device, env.local_rank, env.local_world_size)
        identity = Identity.of(Manifest.of(self.registry), self.resolved())
        sizes, views = self.mesh.sizes(), self.views()
        with (
            log_lines(self._log_level(), env.rank == 0),
            joined(env, device, identity, sizes, self.timeouts.model_dump(), reporter) as world,
        ):
            yield Topology(
                sizes=sizes,
                rank=env.rank,
                world_size=env.world_size,
                local_rank=env.local_rank,
                device=device,
                node_rank=env.node_rank,
                num_nodes=env.num_nodes,
                views=views,
                watchdog=world.watchdog,
            )
