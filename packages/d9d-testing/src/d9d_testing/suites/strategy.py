"""Conformance suite of parallel strategies: loss, gradients and updates must equal the ones of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.job_file.job import Mesh
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec, StrategySpec
from d9d_core.strategy import Applied
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.simulate import simulated_world
from d9d_verify.layouts import Layout

from d9d_testing.collectives import differences, listed_step, recorded_step
from d9d_testing.layouts import Harness, assert_passed, job_of
from d9d_testing.world import World

_TOY = "d9d_testing.toy.plugin"
_TOY_MODEL = {"blocks": 3, "dropout": 0.1}


class StrategySuite:
    """Conformance suite of strategies.

    Subclass it, name the strategy and its meshes::

        class TestMyStrategy(StrategySuite):
            plugin = "my_plugin.plugin"
            target = "my_strategy"
            meshes = ({"dp_shard": 2}, {"dp_shard": 4})

    Every test runs the toy job of d9d-testing, whose model has blocks, an unused parameter and dropout. For a strategy
    that needs another trait, provide a model that maps ``x`` [B, features] to ``y`` [B, features]::

            model_plugin = "my_plugin.my_tests.model"
            model = {"name": "my_model", "features": 8}

    Attributes:
        plugin: declaration module, or path of a single-file plugin.
        target: name of the strategy.
        meshes: meshes to test; small, because every rank is a process. Resume is tested on the last mesh.
        settings: config fields, one mapping for each variation to test. Resume is tested with the first mapping.
        beside: further strategies of the job, as in a job file.
        model: config fields of the toy model, or of another model.
        model_plugin: declaration module, or path of a single-file plugin, of another model.
        large: meshes of a job that is planned without processes; by default, 64 ranks along each axis in turn.
        declares_collectives: whether the strategy lists its collectives (``Applied.collectives``) for ``d9d explain``.
    """

    plugin: ClassVar[str]
    target: ClassVar[str]
    meshes: ClassVar[Sequence[Mapping[str, int]]] = ({},)
    settings: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    beside: ClassVar[Sequence[Any]] = ()
    model: ClassVar[Mapping[str, Any]] = {}
    model_plugin: ClassVar[str | None] = None
    large: ClassVar[Sequence[Mapping[str, int]]] = ()
    declares_collectives: ClassVar[bool] = True

    def test_every_axis_of_its_record_is_tested(self) -> None:
        """Every axis of the record is tested with several ranks, because one rank cannot show a missing reduction."""
        missing = self.spec().axes - {axis for mesh in self.meshes for axis, size in mesh.items() if size > 1}
        assert not missing, f"add a mesh with two or more ranks along {sorted(missing)} to {type(self).__name__}.meshes"

    @pytest.mark.parametrize("microbatch", [4, 1], ids=["one-microbatch", "several-microbatches"])
    def test_loss_gradients_and_updates_are_those_of_one_process(self, microbatch: int) -> None:
        """Loss, gradients and updates of three steps, each from the updated weights, match a single process."""
        for mesh in self.meshes:
            layouts = [self.layout(mesh, settings) for settings in self.settings]
            assert_passed(self.harness(mesh, microbatch).compare(layouts))

    def test_a_run_continues_in_one_process_and_back(self) -> None:
        """A checkpoint of the strategy's layout continues in one process with the same results, and vice versa."""
        mesh = self.meshes[-1]
        harness, plain = self.harness(mesh, microbatch=2), Layout("one process", {}, ())
        mine = self.layout(mesh, self.settings[0])
        assert_passed([harness.compare_resumed(mine, plain), harness.compare_resumed(plain, mine)])

    def test_names_and_shapes_of_parameters_stay(self) -> None:
        """Names and full shapes of parameters do not change, because checkpoints and optimizers depend on them."""
        expected = {name: tuple(parameter.shape) for name, parameter in self.stage().named_parameters()}
        for mesh, settings in product(self.meshes, self.settings):
            stage, _ = self.applied(mesh, settings)
            found = {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}
            gone, new = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
            assert gone == new == [], f"{mesh} {settings}: parameters must keep their names; gone {gone}, new {new}"
            other = {name: (shape, found[name]) for name, shape in expected.items() if shape != found[name]}
            assert not other, f"{mesh} {settings}: parameters must keep their full shapes (before, after): {other}"

    def test_nothing_is_allocated(self) -> None:
        """The strategy allocates no memory: the model stays on the meta device until all strategies are applied."""
        for mesh, settings in product(self.meshes, self.settings):
            stage, _ = self.applied(mesh, settings)
            tensors = [*stage.named_parameters(), *stage.named_buffers()]
            here = [name for name, tensor in tensors if tensor.device.type != "meta"]
            assert not here, (
                f"{mesh} {settings}: allocates {here}; the build does that, once all strategies are applied"
            )

    def test_it_says_what_it_changed_and_whose_gradients_it_reduces(self) -> None:
        """The strategy's ``Applied`` lists a module, and only modules, parameters, views and mesh axes that exist."""
        for mesh, settings in product(self.meshes, self.settings):
            stage, outcome = self.applied(mesh, settings)
            modules, parameters = dict(stage.named_modules()), dict(stage.named_parameters())
            where = f"{mesh} {settings}: Applied"
            views = job_of(self.job_values(), self.plugins()).views()
            dims = {
                name: {dim.name for dim in views[view].dims} for name, view in outcome.views.items() if view in views
            }
            axes = {claim.axis for claim in outcome.gradients if claim.axis not in dims.get(claim.parameter, ())}
            assert outcome.modules, f"{where}.modules is empty; a strategy that changes nothing is an error"
            for what, named, known in (
                ("modules names", outcome.modules, modules),
                ("gradients names parameters", [claim.parameter for claim in outcome.gradients], parameters),
                ("gradients names axes", axes, Mesh().sizes()),
                ("views names parameters", outcome.views, parameters),
                ("views names views", outcome.views.values(), views),
                ("on_host names", outcome.on_host, parameters),
            ):
                unknown = sorted(set(named) - set(known))
                assert not unknown, f"{where}.{what} that do not exist: {unknown}"

    def test_the_plan_of_a_large_job_needs_no_processes(self) -> None:
        """``d9d check`` can apply the strategy in a simulated world."""
        axes = self.spec().axes
        for mesh in self.large or [{axis: 64} for axis in sorted(axes)] or [{}]:
            values = self.job_values(mesh=mesh, parallel=self.parallel(self.settings[0]), batch={"size": 64})
            names = [chosen.spec.name for chosen, _ in job_of(values, self.plugins()).plan().assembly.applied]
            assert self.target in names, f"{mesh}: applied were {names}"

    def test_the_collectives_of_a_traced_step_are_those_it_declares(self) -> None:
        """On the last mesh, the collectives that a step makes on the first and the last rank match the declared ones.

        Kinds, ranks, bytes and numbers of calls are compared (:func:`d9d_testing.collectives.differences`).
        """
        mesh = self.meshes[-1]
        ranks = Mesh(**mesh).world_size
        batch = {"size": 4 * Mesh(**mesh).data_parallel_size, "microbatch": 2}
        for settings in self.settings:
            _, outcome = self.applied(mesh, settings)
            where = f"{mesh} {settings}: Applied.collectives"
            if not self.declares_collectives:
                assert outcome.collectives is None, f"{where} is declared; remove declares_collectives from the suite"
                continue
            assert outcome.collectives is not None, (
                f"{where} is None, so that d9d explain cannot list the strategy's collectives; declare them, or set "
                f"{type(self).__name__}.declares_collectives to False"
            )
            with tempfile.TemporaryDirectory(prefix="d9d-collectives-") as directory:
                run = {"dir": directory}
                values = self.job_values(mesh=dict(mesh), parallel=self.parallel(settings), batch=batch, run=run)
                made = World(ranks, timeout=180.0).run(recorded_step, values, self.plugins())
            for rank in (0, ranks - 1):
                found = differences(listed_step(values, self.plugins(), rank), made[rank])
                assert not found, f"{where} on rank {rank}:\n" + "\n".join(found)

    # --- helpers for subclasses

    def plugins(self) -> list[str]:
        """Declaration modules of the toy plugin, the strategy and the model."""
        return [_TOY, self.plugin, *([self.model_plugin] if self.model_plugin else [])]

    def parallel(self, settings: Mapping[str, Any]) -> list[Any]:
        """Section ``parallel`` of a job: the strategies of ``beside``, and the strategy under test."""
        return [*self.beside, {"name": self.target, **settings}]

    def spec(self) -> StrategySpec:
        """Record of the strategy under test."""
        registry = job_of(self.job_values(), self.plugins()).registry
        spec = registry.find("strategy", self.target).spec
        assert isinstance(spec, StrategySpec)
        return spec

    def model_values(self) -> dict[str, Any]:
        """Model section of a job."""
        return {"name": "toy_model", "features": 6, **({} if self.model_plugin else _TOY_MODEL), **self.model}

    def stage(self) -> torch.nn.Module:
        """Model of the suite on the meta device, before any strategy is applied."""
        job = job_of(self.job_values(), self.plugins())
        spec = job.registry.find("model", job.model.selector).spec
        assert isinstance(spec, ModelSpec)
        with torch.device("meta"):
            model: torch.nn.Module = spec.build.load()(job.model, Stage())
        return model

    def job_values(self, **sections: Any) -> dict[str, Any]:
        """Values of a job file that uses the toy plugin."""
        model = self.model_values()
        return {
            "steps": 4,
            "device": "cpu",
            "batch": {"size": 4},
            "model": model,
            "data": {"name": "toy_data", "features": model["features"]},
            "task": {"name": "toy_task", "decay": 0.01},
            "optimizer": "toy_optimizer",
            "gradient_clipping": {"max_norm": None},
            "trackers": [],
            "export": False,
            **sections,
        }

    def layout(self, mesh: Mapping[str, int], settings: Mapping[str, Any]) -> Layout:
        """Layout with the strategy on a mesh."""
        return Layout(f"{dict(mesh)} {dict(settings)}", mesh, self.parallel(settings))

    def harness(self, mesh: Mapping[str, int], microbatch: int) -> Harness:
        """Harness of the toy job with four samples per step and data-parallel rank."""
        batch = {"size": 4 * Mesh(**mesh).data_parallel_size, "microbatch": microbatch}
        return Harness(self.job_values(batch=batch), self.plugins())

    def applied(self, mesh: Mapping[str, int], settings: Mapping[str, Any]) -> tuple[torch.nn.Module, Applied]:
        """Apply the strategy to the suite's model on the meta device, in a simulated world; return model and result."""
        job = job_of(
            self.job_values(
                mesh=dict(mesh),
                parallel=self.parallel(settings),
                batch={"size": Mesh(**mesh).data_parallel_size},
            ),
            self.plugins(),
        )
        stage, sizes = self.stage(), job.mesh.sizes()
        topology = Topology(sizes=sizes, world_size=job.mesh.world_size, views=job.views(), simulated=True)
        with simulated_world(job.mesh.world_size):
            applied: Applied = self.spec().build.load()(job.parallel[-1]).apply(stage, topology)
        return stage, applied
