"""Jobs from Python: load, plan, build, train.

from d9d_engine.api import Job

Job.load("job.yaml").build().train()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

from d9d_core.config.base import PluginConfig
from d9d_core.config.open_union import Named
from d9d_core.failures import exits_are_errors
from d9d_core.job import JobFile
from d9d_core.plugin.manifest import Manifest

from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.supervision.failure import FailureReporter
from d9d_engine.trackers.config import ConsoleConfig, JsonlConfig

if TYPE_CHECKING:
    from d9d_core.protocols.subscriber import Subscriber

    from d9d_engine.build.plan import Plan
    from d9d_engine.distributed.mesh import Topology
    from d9d_engine.run.trainer import Trainer


def print_note(text: str) -> None:
    """Print a note about long work: one line on standard output, where the lines of steps are."""
    with suppress(OSError):  # a full disk behind it, or a closed terminal, ends no run
        print(text, flush=True)  # noqa: T201 - its purpose


def _silent(_text: str) -> None:
    """Drop a note: all ranks do the same work, and one of them says so."""


class Job(JobFile):
    """A validated job that can be planned, built and trained.

    This module imports no torch: a wrong job file is reported at once.
    """

    trackers: list[Annotated[PluginConfig, Named("tracker")]] = [ConsoleConfig(), JsonlConfig()]
    """Destinations of logged values."""

    @classmethod
    def of(cls, file: JobFile) -> Job:
        """Make the job of a job file that core has read, with the engine's defaults."""
        given = {name: getattr(file, name) for name in file.model_fields_set}
        return cls(**given).use(file.registry, file.source)

    @classmethod
    def _started(cls) -> int | None:
        return ProcessEnv.from_environment(os.environ).world_size

    def plan(self, world_size: int | None = None) -> Plan:
        """Check the whole job without a GPU, a process group or memory for the model.

        Args:
            world_size: number of processes; by default, what the mesh needs.

        Raises:
            D9dError: the job cannot run.
        """
        size = self.mesh.world_size if world_size is None else world_size
        self.check(size)
        from d9d_engine.build.plan import circumstances, plan
        from d9d_engine.distributed.devices import intended_device, is_available
        from d9d_engine.distributed.mesh import Topology
        from d9d_engine.distributed.simulate import simulated_world

        device = intended_device(self.device)
        here = circumstances(self, device if world_size is None and is_available(self.device) else None)
        topology = Topology(sizes=self.mesh.sizes(), world_size=size, device=device, views=self.views(), simulated=True)
        with simulated_world(size):
            return plan(self, self.registry, topology, here)

    def build(
        self,
        note: Callable[[str], None] = print_note,
        topology: Topology | None = None,
        observers: Sequence[Subscriber] = (),
        interrupts: Interrupts | None = None,
    ) -> Trainer:
        """Build the trainer for this process. Collective over all ranks.

        Args:
            note: gets one line about each piece of long work, and warnings.
            topology: this process among others, from :meth:`joined`; by default it is alone.
            observers: subscribers besides those of the job file.
            interrupts: requests to stop, which may have come already; by default, signals during training.

        Raises:
            D9dError: the job cannot run.
        """
        self.resolve(1 if topology is None else topology.world_size)
        from d9d_engine.build.compose import build
        from d9d_engine.distributed.devices import choose_device
        from d9d_engine.distributed.mesh import Topology

        if topology is None:
            topology = Topology(sizes=self.mesh.sizes(), device=choose_device(self.device), views=self.views())
        with exits_are_errors():
            return build(self, self.registry, topology, note if topology.is_main else _silent, observers, interrupts)

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
        from d9d_engine.distributed.devices import device_of, load_kernels_eagerly
        from d9d_engine.distributed.mesh import Topology
        from d9d_engine.distributed.world import joined
        from d9d_engine.supervision.identity import Identity

        if self.mesh.pp > 1:
            load_kernels_eagerly(self.device)
        device = device_of(self.device, env.local_rank, env.local_world_size)
        identity = Identity.of(Manifest.of(self.registry), self.resolved())
        sizes, views = self.mesh.sizes(), self.views()
        with joined(env, device, identity, sizes, self.timeouts.model_dump(), reporter) as world:
            yield Topology(
                sizes=sizes,
                rank=env.rank,
                world_size=env.world_size,
                local_rank=env.local_rank,
                device=device,
                views=views,
                watchdog=world.watchdog,
            )
