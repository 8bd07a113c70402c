"""A job: what the command line does, in Python.

from d9d_core.api import Job

Job.load("job.yaml").build().train()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PrivateAttr

from d9d_core.config.document import Document
from d9d_core.config.job import JobConfig
from d9d_core.config.load import registry_for, validate
from d9d_core.loop.selection import check_capabilities, check_parts, check_world, select
from d9d_core.plugin.capabilities import Circumstances
from d9d_core.plugin.kernels import find_kernel
from d9d_core.plugin.loader import discover
from d9d_core.plugin.manifest import Manifest
from d9d_core.plugin.policy import PluginPolicy
from d9d_core.plugin.records import ViewSpec
from d9d_core.plugin.registry import Registry
from d9d_core.topology.failure import Teller
from d9d_core.topology.place import Place

if TYPE_CHECKING:
    from d9d_core.loop.plan import Plan
    from d9d_core.loop.trainer import Trainer
    from d9d_core.protocols import Subscriber
    from d9d_core.topology.mesh import Topology


def print_note(text: str) -> None:
    """The default for notes about long work: one line on standard output, where the lines of steps are."""
    print(text, flush=True)  # noqa: T201 - its purpose


def _silent(_text: str) -> None:
    """All ranks do the same work; one of them says so."""


class Job(JobConfig):
    """A validated job. Made by :meth:`load` from a file, or directly from config objects.

    This module imports no torch: a wrong job file is reported at once.
    """

    _registry: Registry | None = PrivateAttr(default=None)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        registry: Registry | None = None,
        overrides: Sequence[str] = (),
        policy: PluginPolicy | None = None,
    ) -> Job:
        """Read and validate a job file.

        Args:
            path: YAML, TOML or JSON.
            registry: what names mean; by default, what is installed and the file's ``plugins`` section admits.
            overrides: ``section.field=value``.
            policy: further restrictions on plugins.

        Raises:
            JobError: the file is wrong; one line per problem.
            PluginError: a required or single-file plugin cannot be loaded.
        """
        document = Document.read(Path(path)).override(overrides)
        registry = registry or registry_for(document, policy)
        job = validate(cls, document, registry)
        return job.use(registry)

    @property
    def registry(self) -> Registry:
        """What the job's names mean; discovered on first use if the job was made from config objects."""
        if self._registry is None:
            self._registry = discover(self.plugins.policy())
        return self._registry

    def use(self, registry: Registry) -> Job:
        """Take names from this registry instead of what is installed."""
        self._registry = registry
        return self

    def plan(self, world_size: int | None = None) -> Plan:
        """Check the whole job without a GPU, a process group or memory for the model.

        Args:
            world_size: number of processes; by default, what the mesh needs.

        Raises:
            D9dError: the job cannot run.
        """
        size = self.mesh.world_size if world_size is None else world_size
        self.check_names(size)
        from d9d_core.loop.build import circumstances
        from d9d_core.loop.plan import plan
        from d9d_core.topology.devices import intended_device, is_available
        from d9d_core.topology.mesh import Topology
        from d9d_core.topology.simulate import simulated_world

        device = intended_device(self.device)
        here = circumstances(self, device if world_size is None and is_available(self.device) else None)
        sizes, views = self.mesh.sizes(), self.views()
        topology = Topology(sizes=sizes, world_size=size, device=device, views=views, simulated=True)
        with simulated_world(size):
            for view in views:
                topology.grid(view)
            return plan(self, self.registry, topology, here, size)

    def build(
        self,
        note: Callable[[str], None] = print_note,
        topology: Topology | None = None,
        observers: Sequence[Subscriber] = (),
    ) -> Trainer:
        """Build the trainer for this process. Collective over all ranks.

        Args:
            note: gets one line about each piece of long work, and warnings.
            topology: this process's place among others, from :meth:`joined`; by default it is alone.
            observers: subscribers besides those of the job file.

        Raises:
            D9dError: the job cannot run.
        """
        self.check_names(1 if topology is None else topology.world_size)
        from d9d_core.loop.build import build
        from d9d_core.topology.devices import choose_device
        from d9d_core.topology.mesh import Topology

        if topology is None:
            topology = Topology(sizes=self.mesh.sizes(), device=choose_device(self.device), views=self.views())
        return build(self, self.registry, topology, note if topology.is_main else _silent, observers)

    @contextmanager
    def joined(self, place: Place | None = None, teller: Teller | None = None) -> Iterator[Topology]:
        """Be one of the job's processes inside the block. Collective over all ranks.

        Args:
            place: which process this is; by default, what the environment says.
            teller: tells the user why this rank failed; by default an exception just leaves the block.

        Raises:
            D9dError: this rank has no device, ranks run different things, or some did not arrive.
        """
        place = place or Place.from_environment(os.environ)
        check_world(self, place.world_size)
        from d9d_core.topology.agreement import Identity
        from d9d_core.topology.devices import device_of, load_kernels_eagerly
        from d9d_core.topology.mesh import Topology
        from d9d_core.topology.world import joined

        if self.mesh.pp > 1:
            load_kernels_eagerly(self.device)
        device = device_of(self.device, place.local_rank, place.local_world_size)
        identity = Identity.of(Manifest.of(self.registry), self.resolved())
        sizes, views = self.mesh.sizes(), self.views()
        with joined(place, device, identity, sizes, self.timeouts.model_dump(), teller) as world:
            yield Topology(
                sizes=sizes,
                rank=place.rank,
                world_size=place.world_size,
                local_rank=place.local_rank,
                device=device,
                views=views,
                watchdog=world.watchdog,
            )

    def views(self) -> dict[str, ViewSpec]:
        """The views of the mesh that the loaded plugins declare, by name.

        Raises:
            PluginError: several plugins declare one name.
        """
        names = {entry.spec.key for entry in self.registry.entries("view")}
        views = {}
        for name in sorted(names):
            spec = self.registry.find("view", name).spec
            assert isinstance(spec, ViewSpec)
            views[name] = spec
        return views

    def check_names(self, world_size: int) -> None:
        """Everything that can be refused before torch is imported.

        Raises:
            D9dError: the job cannot run on this many processes.
        """
        check_world(self, world_size)
        selection = select(self, self.registry)
        check_parts(self, selection)
        check_capabilities(selection, self.registry, Circumstances(self.mesh.sizes()))
        for op, selector in self.kernels.items():
            find_kernel(self.registry, op, selector)
