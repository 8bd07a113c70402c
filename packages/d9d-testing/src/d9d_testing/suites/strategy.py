"""What every strategy must do: change how a model runs, and nothing about what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.config.job import Mesh
from d9d_core.errors import D9dError
from d9d_core.plugin.records import StrategySpec
from d9d_core.topology.mesh import Topology
from d9d_core.topology.simulate import simulated_world
from d9d_core.verify.layouts import Layout

from d9d_testing.layouts import Harness, assert_passed, job_of
from d9d_testing.toy.config import ToyModelConfig
from d9d_testing.toy.model import ToyModel

_TOY = "d9d_testing.toy.plugin"


class StrategySuite:
    """The conformance suite of strategies.

    Subclass it, name the strategy and the meshes it is for::

        class TestMyStrategy(StrategySuite):
            plugin = "my_plugin.plugin"
            target = "my_strategy"
            meshes = ({"dp_shard": 2}, {"dp_shard": 4})

    Every test runs the toy job of d9d-testing, whose model has blocks, an unused parameter and dropout.

    Attributes:
        plugin: the module that declares it.
        target: its name.
        meshes: the meshes it is tested on; small, as every rank is a process.
        settings: fields of its config, one mapping for each variation to test.
        beside: further strategies of the job, as a job file lists them.
        model: fields of the toy model.
    """

    plugin: ClassVar[str]
    target: ClassVar[str]
    meshes: ClassVar[Sequence[Mapping[str, int]]] = ({},)
    settings: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    beside: ClassVar[Sequence[Any]] = ()
    model: ClassVar[Mapping[str, Any]] = {}

    @pytest.mark.parametrize("microbatch", [4, 1], ids=["one-microbatch", "several-microbatches"])
    def test_loss_gradients_and_updates_are_those_of_one_process(self, microbatch: int) -> None:
        """Three optimizer steps; weights after a step show in the gradients of the next."""
        # 24 samples in microbatches of 4 are one microbatch on 6 ranks: choose the batch by the mesh instead.
        for mesh in self.meshes:
            ranks = Mesh(**mesh).data_parallel_size
            harness = Harness(self.job_values(batch={"size": 4 * ranks, "microbatch": microbatch}), self.plugins())
            layouts = [Layout(f"{mesh} {s}", mesh, self.parallel(s)) for s in self.settings]
            assert_passed(harness.compare(layouts))

    def test_names_and_shapes_of_parameters_stay(self) -> None:
        """Checkpoints and optimizers know parameters by name."""
        for mesh in self.meshes:
            with torch.device("meta"):
                plain = ToyModel(self.toy_model())
            expected = {name: parameter.shape for name, parameter in plain.named_parameters()}
            stage, _ = self.applied(mesh)
            assert {name: parameter.shape for name, parameter in stage.named_parameters()} == expected

    def test_it_says_what_it_changed_and_whose_gradients_it_reduces(self) -> None:
        """Modules and parameters that exist; axes that the record declares, or that lie inside them."""
        for mesh in self.meshes:
            stage, outcome = self.applied(mesh)
            modules, parameters = dict(stage.named_modules()), dict(stage.named_parameters())
            assert outcome.modules
            assert set(outcome.modules) <= modules.keys()
            assert {claim.parameter for claim in outcome.gradients} <= parameters.keys()
            assert {claim.axis for claim in outcome.gradients} <= Mesh().sizes().keys()

    def test_without_it_its_axes_are_refused(self) -> None:
        """Ranks along an axis that nothing uses would all do the same work."""
        for axis in self.spec().axes:
            job = job_of(self.job_values(mesh={axis: 2}, parallel=list(self.beside)), self.plugins())
            with pytest.raises(D9dError, match=f"mesh.{axis} is 2, but nothing in the job uses that axis"):
                job.plan()

    def test_the_plan_of_a_large_job_needs_no_processes(self) -> None:
        """``d9d check`` applies it to the model in a simulated world."""
        for axis in self.spec().axes:
            mesh = {axis: 64}
            values = self.job_values(mesh=mesh, parallel=self.parallel(self.settings[0]), batch={"size": 64})
            assert job_of(values, self.plugins()).plan().assembly.applied

    # --- what subclasses may use

    def plugins(self) -> list[str]:
        """The toy plugin and the strategy's."""
        return [_TOY, self.plugin]

    def parallel(self, settings: Mapping[str, Any]) -> list[Any]:
        """The strategies of a job."""
        return [*self.beside, {"name": self.target, **settings}]

    def spec(self) -> StrategySpec:
        """The record."""
        registry = job_of(self.job_values(), self.plugins()).registry
        spec = registry.find("strategy", self.target).spec
        assert isinstance(spec, StrategySpec)
        return spec

    def toy_model(self) -> ToyModelConfig:
        """The toy model's config."""
        return ToyModelConfig(**{"features": 6, "blocks": 3, "dropout": 0.1, **self.model})

    def job_values(self, **sections: Any) -> dict[str, Any]:
        """A job file over the toy plugin."""
        model = self.toy_model()
        return {
            "steps": 4,
            "device": "cpu",
            "batch": {"size": 4},
            "model": model.model_dump(),
            "data": {"name": "toy_data", "features": model.features},
            "task": {"name": "toy_task", "decay": 0.01},
            "optimizer": "toy_optimizer",
            "gradient_clipping": {"max_norm": None},
            "trackers": [],
            "export": False,
            **sections,
        }

    def applied(self, mesh: Mapping[str, int]) -> tuple[torch.nn.Module, Any]:
        """The toy model on the meta device after the strategy, in a simulated world, and what the strategy says."""
        job = job_of(
            self.job_values(
                mesh=dict(mesh),
                parallel=self.parallel(self.settings[0]),
                batch={"size": Mesh(**mesh).data_parallel_size},
            ),
            self.plugins(),
        )
        with torch.device("meta"):
            stage = ToyModel(self.toy_model())
        sizes = job.mesh.sizes()
        topology = Topology(sizes=sizes, world_size=job.mesh.world_size, views=job.views(), simulated=True)
        with simulated_world(job.mesh.world_size):
            return stage, self.spec().build.load()(job.parallel[-1]).apply(stage, topology)
