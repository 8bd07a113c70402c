"""Validated job files, together with the registry that resolves their names. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr

from d9d_core.components.instantiate import instantiate
from d9d_core.data import DataContext, DataStream
from d9d_core.errors import JobError
from d9d_core.grid import Grid
from d9d_core.job_file.document import Document
from d9d_core.job_file.inner import choose
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.job_file.load import registry_for, validate_job
from d9d_core.job_file.resolve import Parts, Resolution, resolve, select_parts
from d9d_core.job_file.saved_job import SavedJob
from d9d_core.layout.auto import Source, settle
from d9d_core.layout.report import check_layout
from d9d_core.plugin import ViewSpec
from d9d_core.registry.capabilities import Circumstances
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry

__all__ = ["JobFile"]


class LoadedJob(BaseJob):
    """Job of any kind with the registry that resolves its names. Made by :meth:`load` or from config objects."""

    _registry: Registry | None = PrivateAttr(default=None)
    _source: Source = PrivateAttr(default_factory=Source)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        registry: Registry | None = None,
        overrides: Sequence[str] = (),
        policy: PluginPolicy | None = None,
        world_size: int | None = None,
    ) -> Self:
        """Read and validate a job file.

        Args:
            path: YAML, TOML or JSON file.
            registry: registry that resolves names; by default, installed plugins that the section ``plugins`` allows.
            overrides: assignments ``section.field=value``.
            policy: further restrictions on plugins, and further plugin files.
            world_size: number of processes, for a mesh with ``auto`` and for a file without a mesh; by default, the
                number of started processes, if known.

        Raises:
            JobError: the file is invalid; one line per problem.
            PluginError: a plugin, or the plugin policy, is refused; see :func:`d9d_core.registry.loader.discover`.
        """
        document = Document.read(Path(path)).override(overrides)
        started = cls._started() if world_size is None else world_size
        return cls._read(document, registry or registry_for(document, policy), started)

    @classmethod
    def load_saved(
        cls,
        saved: SavedJob,
        *,
        registry: Registry | None = None,
        overrides: Sequence[str] = (),
        policy: PluginPolicy | None = None,
        world_size: int | None = None,
    ) -> Self:
        """Read the job file of a directory that may be downloaded; code and addresses that the file names are refused.

        Args:
            saved: the job file, and for messages the command that runs the file as trusted.
            registry: registry that resolves names; by default, installed plugins that the section ``plugins`` allows.
            overrides: assignments ``section.field=value``, which are trusted.
            policy: restrictions on plugins, and the plugin files of the command line.
            world_size: number of processes, for a mesh with ``auto`` and for a file without a mesh; by default, the
                number of started processes, if known.

        Raises:
            JobError: the file is invalid, or names a plugin file, code to import, or an address.
            PluginError: a plugin, or the plugin policy, is refused; see :func:`d9d_core.registry.loader.discover`.
        """
        document = saved.read(overrides)
        started = cls._started() if world_size is None else world_size
        job = cls._read(document, registry or registry_for(document, policy), started)
        saved.check(job, document)
        return job

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], *, registry: Registry | None = None, world_size: int | None = None
    ) -> Self:
        """Validate the values of a job file that were read or created elsewhere.

        Args:
            values: mappings, lists and scalars, as in a job file.
            registry: registry that resolves names; by default, installed plugins that the section ``plugins`` allows.
            world_size: number of processes, for a mesh with ``auto`` and for values without a mesh; by default, one.

        Raises:
            JobError: a value is invalid; one line per problem.
            PluginError: a plugin, or the plugin policy, is refused; see :func:`d9d_core.registry.loader.discover`.
        """
        document = Document(dict(values))
        return cls._read(document, registry or registry_for(document), world_size)

    @classmethod
    def _read(cls, document: Document, registry: Registry, world_size: int | None) -> Self:
        source = settle(document, registry, world_size)
        try:
            return validate_job(cls, source.document, registry).use(registry, source)
        except JobError as error:
            if source.note is not None:  # for example, the chosen layout needs a strategy that is not installed
                error.add_note(source.note)
            raise

    @classmethod
    def _started(cls) -> int | None:
        """Number of started processes; unknown in d9d-core, which starts none."""
        return None

    @property
    def source(self) -> Source:
        """Source of the job: its file, and the axis of its mesh that was ``auto``."""
        return self._source

    @property
    def registry(self) -> Registry:
        """Registry that resolves the job's names; discovered on first use if the job was made from config objects."""
        if self._registry is None:
            self._registry = discover(self.plugins.policy())
        return self._registry

    def use(self, registry: Registry, source: Source | None = None) -> Self:
        """Resolve names by ``registry`` instead of the installed plugins, and refer to ``source`` in messages."""
        self._registry = registry
        self._source = source or self._source
        return self

    def open_data(self, context: DataContext) -> DataStream:
        """Open the training data for one data-parallel rank.

        Raises:
            D9dError: the data cannot be opened.
        """
        stream: DataStream = instantiate(choose(self.registry, "dataset", "data", self.data), self.data, context)
        return stream

    def views(self) -> dict[str, ViewSpec]:
        """Views of the mesh that the loaded plugins declare, by name.

        Raises:
            PluginError: several plugins declare the same name.
        """
        names = {entry.spec.key for entry in self.registry.entries("view")}
        views = {}
        for name in sorted(names):
            spec = self.registry.find("view", name).spec
            assert isinstance(spec, ViewSpec)
            views[name] = spec
        return views

    def check_layout(self, world_size: int) -> Any:
        """Select the records of the job's names; check mesh, views, strategies, schedule and batch for ``world_size``.

        Returns:
            :class:`~d9d_core.job_file.resolve.Parts` of the job's kind.

        Raises:
            D9dError: one line per problem; a note has an edit that solves all of them, if one was found.
        """
        with self._source.document.placing():
            selection = select_parts(self, self.registry)
            check_layout(self, selection, self.registry, world_size, self._source)
            for view in self.views().values():
                Grid.of_view(view, self.mesh.sizes())
            return selection

    def resolve(self, world_size: int) -> Resolution[Any]:
        """Select the records of the job's names and check them against each other, the mesh and ``world_size``.

        Raises:
            D9dError: the job cannot run with this number of processes.
        """
        selection: Parts = self.check_layout(world_size)
        with self._source.document.placing():
            return resolve(self, selection, self.registry, Circumstances(self.mesh.sizes()))

    def check(self, world_size: int | None = None) -> Resolution[Any]:
        """Check everything that needs no tensors: names, values, capabilities, views, the schedule's programs.

        Args:
            world_size: number of processes; by default, the number that the mesh needs.

        Raises:
            D9dError: the job cannot run.
        """
        return self.resolve(self.mesh.world_size if world_size is None else world_size)


class JobFile(LoadedJob, JobConfig):
    """Validated job file of training. Made by :meth:`load` or from config objects.

    This class can check names, values, capabilities, the mesh and the pipeline schedule. Its subclass ``Job`` in
    d9d-engine can also run the job.
    """
