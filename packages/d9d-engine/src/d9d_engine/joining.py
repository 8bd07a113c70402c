"""Joining of a job's processes, whatever the job does. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from d9d_core.failures import exits_are_errors
from d9d_core.job import LoadedJob
from d9d_core.plugin import ScheduleSpec
from d9d_core.registry.manifest import Manifest
from d9d_core.untrusted import visible

from d9d_engine.process_env import ProcessEnv
from d9d_engine.supervision.failure import FailureReporter

if TYPE_CHECKING:
    from d9d_engine.compose.root import Root
    from d9d_engine.distributed.mesh import Topology


def print_note(text: str) -> None:
    """Print a note about long work: one line on standard output, where the lines of steps are."""
    with suppress(OSError):  # a full disk behind it, or a closed terminal, ends no run
        print(visible(text), flush=True)  # noqa: T201 - its purpose


def silent(_text: str) -> None:
    """Drop a note: all ranks do the same work, and one of them says so."""


class JoinsProcesses(LoadedJob):
    """Job that runs as one process or as several."""

    @classmethod
    def _started(cls) -> int | None:
        return ProcessEnv.from_environment(os.environ).world_size

    def _only_transfers(self) -> bool:
        """Whether ranks communicate by a schedule's transfers alone in the middle of a step, which may be in order."""
        if self.pipeline is None or not self.mesh.pp == self.mesh.world_size > 1:
            return False
        spec = self.registry.find("schedule", self.pipeline.name).spec
        return isinstance(spec, ScheduleSpec) and spec.ordered_transfers

    def _log_level(self) -> str | None:
        """Least level of the log lines, if the job says."""
        return None

    @contextmanager
    def composed(self, note: Callable[[str], None], topology: Topology | None) -> Iterator[Root[Any, Any]]:
        """Root of what the job is composed to in this process, inside the block.

        Names and layout are checked before torch is imported; the rest is judged once the device is known.

        Args:
            note: prints a line about long work or a warning; on the main rank only.
            topology: this process among others; ``None`` if it is alone.

        Raises:
            D9dError: the job cannot run.
        """
        selection = self.check_layout(1 if topology is None else topology.world_size)
        from d9d_engine.compose.root import compose_root
        from d9d_engine.distributed.determinism import prepare_determinism
        from d9d_engine.distributed.devices import choose_device
        from d9d_engine.distributed.mesh import Topology

        if self.deterministic:
            prepare_determinism(self.device)
        if topology is None:
            topology = Topology(sizes=self.mesh.sizes(), device=choose_device(self.device), views=self.views())
        with exits_are_errors():
            yield compose_root(self, selection, self.registry, topology, note if topology.is_main else silent)

    @contextmanager
    def joined(self, env: ProcessEnv | None = None, reporter: FailureReporter | None = None) -> Iterator[Topology]:
        """Join the job's processes inside the block. Collective over all ranks.

        Args:
            env: which process this is; by default, what the environment says.
            reporter: tells the user why this rank failed; by default an exception just leaves the block.

        Raises:
            D9dError: this rank has no device, ranks run different things, or some did not arrive.
        """
        env = env or ProcessEnv.from_environment(os.environ)
        if self.mesh.world_size != env.world_size:
            self.check_layout(env.world_size)  # says why, and what else does not fit
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
