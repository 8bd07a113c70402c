"""Harness that runs one job in many layouts, for the strategy suite and the layout table.

Layouts with the same number of ranks share a world, because starting processes takes longer than tiny jobs.
"""

from __future__ import annotations

import importlib
import runpy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from d9d_core.job_file.document import Document
from d9d_core.registry.registry import Registry
from d9d_core.registry.single_file import file_plugin
from d9d_engine.distributed.devices import load_kernels_eagerly
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_verify.compare import Verdict, compare
from d9d_verify.deviations import Limits
from d9d_verify.layouts import Layout
from d9d_verify.measure import Witness, join_replicas, measure
from d9d_verify.measurement import Measurement, Record
from d9d_verify.run import narrowest_dtype
from torch import distributed as dist

from d9d_testing.world import World


@dataclass(frozen=True)
class Harness:
    """Job that is run in several layouts and compared.

    Attributes:
        values: values of the job file; each layout replaces mesh and parallel.
        plugins: plugins of the job: modules, or paths of single-file plugins.
        steps: number of optimizer steps.
    """

    values: Mapping[str, Any]
    plugins: Sequence[str]
    steps: int = 3

    def measure(
        self,
        layouts: Sequence[Layout],
        fault: str | None = None,
        guides: Sequence[Measurement] = (),
        elsewhere: bool = False,
    ) -> list[Measurement]:
        """Measure each layout, in the given order.

        Args:
            layouts: layouts to measure, each with one or more ranks.
            fault: ``file.py:function``, called with each job on every rank before it is built.
            guides: for each layout, a measurement whose gradients the layout's optimizer gets instead of its own
                gradients, so that every step starts from the same weights.
            elsewhere: whether to vary the rounding of results, as a correct run on another machine might.
        """
        found: dict[int, Measurement] = {}
        with tempfile.TemporaryDirectory(prefix="d9d-layouts-") as directory:
            for ranks in sorted({layout.ranks for layout in layouts}):
                here = [index for index, layout in enumerate(layouts) if layout.ranks == ranks]
                jobs = [{"run": {"dir": directory}, **self._job_values(layouts[index])} for index in here]
                world = World(ranks, timeout=180.0, backend=self._backend())
                given = [vars(guides[index].guide()) for index in here] if guides else [None] * len(here)
                ranks_found = world.run(measure_all, jobs, list(self.plugins), self.steps, fault, given, elsewhere)
                found |= {
                    index: Measurement.of([Record(**of_rank) for of_rank in of_job])
                    for index, *of_job in zip(here, *ranks_found, strict=True)
                }
        return [found[index] for index in range(len(layouts))]

    def compare(
        self,
        layouts: Sequence[Layout],
        reference: Layout | None = None,
        fault: str | None = None,
    ) -> list[Verdict]:
        """Compare each layout with a reference, by default one process without strategies.

        Args:
            layouts: layouts to compare, each with one or more ranks.
            reference: layout to compare with.
            fault: ``file.py:function``, called on every rank before a layout (but not the reference) is built, to
                verify that its damage is detected.

        Raises:
            RankFailedError: a rank raised an exception.
        """
        reference = reference or Layout("one process", {}, ())
        expected = self.measure([reference])[0]
        sound = self.measure([reference], guides=[expected], elsewhere=True)
        found = self.measure(layouts, fault, [expected] * len(layouts))
        return [
            compare(layout.name, measured, expected, Limits.of(self._dtype(layout), expected, sound))
            for layout, measured in zip(layouts, found, strict=True)
        ]

    def compare_resumed(self, first: Layout, second: Layout, reference: Layout | None = None) -> Verdict:
        """Compare a run that changes its layout half-way with the reference, by default one process.

        The job's learning rate must not depend on the number of steps, because the first half is a separate job.

        Args:
            first: layout that runs half of the steps and saves.
            second: layout that continues from the checkpoint.
            reference: layout of the whole run to compare with.

        Raises:
            RankFailedError: a rank raised an exception, for example because the second layout cannot load the
                checkpoint.
            AssertionError: the second layout did not continue from the checkpoint.
        """
        reference = reference or Layout("one process", {}, ())
        expected, half = self.measure([reference])[0], self.steps // 2
        (sound,) = self.measure([reference], guides=[expected], elsewhere=True)
        parts = []
        with tempfile.TemporaryDirectory(prefix="d9d-layouts-") as directory:
            for layout, steps in ((first, half), (second, self.steps)):
                job = self._job_values(layout) | {"run": {"name": "resumed", "dir": directory}, "steps": steps}
                world = World(layout.ranks, timeout=180.0, backend=self._backend())
                of_ranks = world.run(train_part, job, list(self.plugins), vars(expected.guide()))
                parts.append(Measurement.of([Record(**of_rank) for of_rank in of_ranks]))
        assert [part.steps for part in parts] == [half, self.steps - half], (
            "the second half did not resume from the first"
        )
        together = parts[0].with_steps_of(parts[1])
        without_end = {name: value for name, value in expected.numbers.items() if not name.startswith("end/")}
        dtype = max((self._dtype(layout) for layout in (first, second)), key=lambda dtype: torch.finfo(dtype).eps)
        name = f"{first.name}, then {second.name}"
        limits = Limits.of(dtype, expected, [sound])
        return compare(name, together, replace(expected, numbers=without_end), limits)

    def _dtype(self, layout: Layout) -> torch.dtype:
        return narrowest_dtype({"precision": {}, **self._job_values(layout)})

    def _backend(self) -> str:
        return "gloo" if self.values.get("device", "cpu") == "cpu" else "cpu:gloo,cuda:nccl"

    def _job_values(self, layout: Layout) -> dict[str, Any]:
        values = dict(self.values) | {"mesh": dict(layout.mesh), "parallel": list(layout.parallel)}
        return Document(values).override(layout.overrides).values


def assert_passed(verdicts: Sequence[Verdict]) -> None:
    """Assert that every layout agrees with the reference.

    Raises:
        AssertionError: a layout did not; the message has one line per failed layout.
    """
    failed = [f"{v.layout}: step {v.diverged[0] + 1}: {v.diverged[1]}" for v in verdicts if v.diverged is not None]
    assert not failed, "\n".join(failed)


def measure_all(
    jobs: Sequence[Mapping[str, Any]],
    plugins: Sequence[str],
    steps: int,
    fault: str | None,
    guides: Sequence[Mapping[str, Any] | None],
    elsewhere: bool,
) -> list[dict[str, Any]]:
    """Measure several jobs, one after the other, and return their records. Every rank of a world must call it."""
    found = []
    for values, guide in zip(jobs, guides, strict=True):
        job = job_of(values, plugins)
        if fault is not None:
            file, _, function = fault.rpartition(":")
            runpy.run_path(file)[function](job)
        go_by = None if guide is None else Measurement(**guide)
        record = measure(job, topology_here(job), steps, go_by, elsewhere=elsewhere)
        found.append(vars(record))
    return found


def train_part(values: Mapping[str, Any], plugins: Sequence[str], guide: Mapping[str, Any]) -> dict[str, Any]:
    """Train a job to its end, from its newest checkpoint if there is one, and return the record.

    Collective over a world.
    """
    job = job_of(values, plugins)
    witness = Witness(Measurement(**guide))
    trainer = job.build(lambda _text: None, topology_here(job), observers=[witness])
    join_replicas(trainer)
    trainer.train()
    return vars(witness.record)


def job_of(values: Mapping[str, Any], plugins: Sequence[str]) -> Job:
    """Validated job that uses exactly these plugins: modules, or paths of single-file plugins."""
    registry = Registry.of(*map(_plugin_module, plugins))
    return Job.from_values(values, registry=registry)


def _plugin_module(plugin: str) -> object:
    if not plugin.endswith(".py"):
        return importlib.import_module(plugin)
    _, load = file_plugin(Path(plugin))
    return load()


def topology_here(job: Job) -> Topology:
    """Topology of this process in the default process group; on CUDA, each rank has its own device."""
    device = torch.device("cpu")
    if job.device != "cpu":
        load_kernels_eagerly(job.device)  # needed if any job of this process has a pipeline
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    return Topology(
        sizes=job.mesh.sizes(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_rank(),
        device=device,
        views=job.views(),
    )
