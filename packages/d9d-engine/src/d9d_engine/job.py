"""Python interface to jobs.

Load, plan, build and train a job::

    from d9d_engine.job import Job

    Job.load("job.yaml").build().train()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from d9d_core.config import PluginConfig
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.job_file.open_union import Named

from d9d_engine.joining import JoinsProcesses, print_note
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.trackers.config import ConsoleConfig, JsonlConfig

if TYPE_CHECKING:
    from d9d_core.subscriber import Subscriber

    from d9d_engine.compose.plan import Plan
    from d9d_engine.distributed.mesh import Topology
    from d9d_engine.run.trainer import Trainer

__all__ = ["Job"]


class Job(JoinsProcesses, JobFile):
    """A validated job that can be planned, built and trained.

    This module imports no torch: an invalid job file is reported before the slow import.
    """

    trackers: list[Annotated[PluginConfig, Named("tracker")]] = [ConsoleConfig(), JsonlConfig()]
    """Destinations of logged values."""

    @classmethod
    def of(cls, file: JobFile) -> Job:
        """Make a job from the values of a parsed job file, with the engine's defaults."""
        given = {name: getattr(file, name) for name in type(file).model_fields}
        if "trackers" not in file.source.document.values:
            del given["trackers"]
        return cls(**given).use(file.registry, file.source)

    def plan(self, world_size: int | None = None, rank: int = 0) -> Plan:
        """Check the whole job without a GPU, a process group or memory for the model.

        Args:
            world_size: number of processes; by default, the product of the mesh axes.
            rank: rank to plan for.

        Raises:
            D9dError: the job cannot run, or ``rank`` is not one of the ``world_size`` ranks.
        """
        size = self.mesh.world_size if world_size is None else world_size
        selection = self.check_layout(size)
        if not 0 <= rank < size:
            raise JobError(f"rank {rank} is not in the job; give a rank from 0 to {size - 1}")
        from d9d_engine.compose.plan import plan
        from d9d_engine.compose.root import circumstances, compose_root
        from d9d_engine.distributed.devices import intended_device, is_available
        from d9d_engine.distributed.mesh import Topology
        from d9d_engine.distributed.simulate import simulated_world

        device = intended_device(self.device)
        here = circumstances(self, device if world_size is None and is_available(self.device) else None)
        topology = Topology(
            sizes=self.mesh.sizes(), rank=rank, world_size=size, device=device, views=self.views(), simulated=True
        )
        with self.source.document.placing(), simulated_world(size, rank):
            return plan(compose_root(self, selection, self.registry, topology, print_note, here))

    def _log_level(self) -> str | None:
        return self.logging.level

    def build(
        self,
        note: Callable[[str], None] = print_note,
        topology: Topology | None = None,
        observers: Sequence[Subscriber] = (),
        interrupts: Interrupts | None = None,
        owning: bool = False,
    ) -> Trainer:
        """Build the trainer for this process. Collective over all ranks.

        Args:
            note: called with one line of text for each warning and at the start of long operations.
            topology: rank and process groups, from :meth:`joined`; by default, a single process.
            observers: subscribers in addition to the subscribers in the job file.
            interrupts: stop requests, which may already have arrived; by default, signals received during training.
            owning: take ownership of the run's directory now, instead of for the duration of training. A second process
                for the same run then fails before it reads data or weights.

        Raises:
            D9dError: the job cannot run.
        """
        with self.composed(note, topology) as root:
            from d9d_engine.compose.training import build

            return build(root, observers, interrupts, owning)
