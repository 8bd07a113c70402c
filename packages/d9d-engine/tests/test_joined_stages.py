"""Several stages as one module: everything has the name that it has in the whole model, and is there once."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.kernel import Decision, OpSignature, OpSlot
from d9d_core.model import Stage
from d9d_core.plugin import KernelSpec, Ref, hookimpl
from d9d_core.registry.capabilities import Circumstances, Judge
from d9d_core.registry.registry import Registry
from d9d_engine.compose.joined_stages import JoinedStages, joined_stages
from d9d_engine.compose.kernels import bind_kernels
from d9d_testing.toy.config import ToyModelConfig
from d9d_testing.toy.model import ToyModel
from d9d_weights.sharding.model_tensors import model_tensors
from torch import nn

CONFIG = ToyModelConfig(blocks=5)


@pytest.fixture
def stages() -> list[ToyModel]:
    """The first, the third and the last of four; the last has a parameter of the first, too."""
    found = [ToyModel(CONFIG, Stage(index, 4)) for index in (0, 2, 3)]
    found[2].unused = nn.Parameter(torch.full((1,), 7.0))
    for stage in found:
        for block in stage.layers.children():
            nn.init.ones_(block.get_parameter("weight"))
    found[0].unused.data.fill_(3.0)
    return found


def test_names_are_those_of_the_whole_model_and_each_is_there_once(stages: list[ToyModel]) -> None:
    model, whole = joined_stages(stages), ToyModel(CONFIG)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    assert set(names) <= {name for name, _ in whole.named_parameters()}
    assert set(names) == {"unused", "layers.0.weight", "layers.1.weight", "layers.3.weight", "layers.4.weight"}
    assert [name for name, _ in model.named_buffers()] == ["scale"]
    assert model.state_dict().keys() == {*names, "scale"}
    assert model_tensors(model).keys() == {*names, "scale"}


def test_a_name_that_several_stages_have_stands_for_the_first(stages: list[ToyModel]) -> None:
    model = joined_stages(stages)
    assert dict(model.named_parameters())["unused"] is stages[0].unused
    assert model.get_parameter("unused") is stages[0].unused
    assert model.state_dict()["unused"].item() == 3.0


def test_everything_is_found_by_its_name(stages: list[ToyModel]) -> None:
    model = joined_stages(stages)
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
    assert model.get_buffer("scale") is stages[2].get_buffer("scale")
    assert model.get_submodule("layers.4") is stages[2].layers["4"]
    for get, name in ((model.get_parameter, "layers.2.weight"), (model.get_buffer, "none"), (model.get_submodule, "x")):
        with pytest.raises(AttributeError, match=f"no pipeline stage of this rank has the .* '{name}'"):
            get(name)


def test_modes_and_formats_reach_all_stages(stages: list[ToyModel]) -> None:
    model = joined_stages(stages)
    assert [module for name, module in model.named_modules() if name == ""] == stages
    assert set(model.modules()) == {module for stage in stages for module in stage.modules()}
    model.eval()
    assert not any(module.training for stage in stages for module in stage.modules())
    model.train()
    assert all(module.training for stage in stages for module in stage.modules())
    model.to(torch.float64)
    assert {parameter.dtype for stage in stages for parameter in stage.parameters()} == {torch.float64}


class Calling(ToyModel):
    """Calls an op in every stage, under one name."""

    def __init__(self, config: ToyModelConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        self.slot = OpSlot("square", torch.square)

    def op_slots(self) -> dict[str, OpSlot]:
        return {"slot": self.slot}


class Backends:
    """Objects that the record refers to; looked up by attribute."""

    @staticmethod
    def supports(_signature: OpSignature) -> Decision:
        return Decision(True, "takes everything", priority=1)

    @staticmethod
    def build(_signature: OpSignature) -> Any:
        return torch.square


def test_kernels_reach_modules_of_equal_names_in_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    @hookimpl
    def d9d_kernels() -> list[KernelSpec]:
        supports, build = (Ref(f"backends_for_this_test:B.{name}") for name in ("supports", "build"))
        return [KernelSpec(name="fast", op="square", summary="x", supports=supports, build=build)]

    monkeypatch.setitem(sys.modules, "backends_for_this_test", SimpleNamespace(B=Backends))
    registry = Registry.of(SimpleNamespace(d9d_kernels=d9d_kernels, __name__="acme"))
    stages = [Calling(CONFIG, Stage(index, 3)) for index in range(3)]
    judge = Judge([], registry, Circumstances(device="cpu"))
    (choice,) = bind_kernels(joined_stages(stages).named_modules(), registry, {}, "cpu", "float32", judge.verdicts)
    assert [stage.slot.backend for stage in stages] == ["fast"] * 3
    assert choice.sites == ("slot",)


def test_an_only_stage_is_that_module_itself(stages: list[ToyModel]) -> None:
    assert joined_stages(stages[:1]) is stages[0]
    assert isinstance(joined_stages(stages), JoinedStages)


def test_shared_tensors_and_modules_of_a_stage_are_named_once_unless_all_names_are_asked_for() -> None:
    stages = [nn.Sequential(one := nn.BatchNorm1d(2), one), nn.ModuleDict({"z": nn.Linear(1, 1)})]
    model = joined_stages(stages)
    buffers, parameters = ("running_mean", "running_var", "num_batches_tracked"), ("weight", "bias")
    of_z = [f"z.{name}" for name in parameters]
    assert [name for name, _ in model.named_parameters()] == [*(f"0.{name}" for name in parameters), *of_z]
    assert [name for name, _ in model.named_buffers()] == [f"0.{name}" for name in buffers]
    assert [name for name, _ in model.named_modules()] == ["", "0", "", "z"]
    every = [f"{place}.{name}" for place in (0, 1) for name in parameters]
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [*every, *of_z]
    every = [f"{place}.{name}" for place in (0, 1) for name in buffers]
    assert [name for name, _ in model.named_buffers(remove_duplicate=False)] == every
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == ["", "0", "1", "", "z"]
    assert [name for name, _ in model.named_parameters("a", recurse=False)] == []
    assert next(iter(model.named_parameters("a")))[0] == "a.0.weight"
