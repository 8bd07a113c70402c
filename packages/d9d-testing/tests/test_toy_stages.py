"""The toy model, cut into pipeline stages, is the toy model."""

from __future__ import annotations

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_core.traits import PipelineStage
from d9d_core.types import TensorSpec
from d9d_engine.compose.initialise import initialise
from d9d_testing.suites.model import ModelSuite
from d9d_testing.tolerances import assert_close_values
from d9d_testing.toy.config import ToyModelConfig
from d9d_testing.toy.model import ToyModel, build
from torch import nn

CONFIG = ToyModelConfig(blocks=5)


class TestToyModel(ModelSuite):
    plugin = "d9d_testing.toy.plugin"
    target = "toy_model"

    # Its config.json is a small part of its config.
    test_hugging_face_round_trip_is_bitwise = None


def initialised(stage: Stage) -> nn.Module:
    model = build(CONFIG, stage)
    initialise(model, 3, torch.device("cpu"))
    return model


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_hold_and_compute_what_the_whole_does(count: int) -> None:
    whole, stages = initialised(Stage()), [initialised(Stage(index, count)) for index in range(count)]
    states = [stage.state_dict() for stage in stages]
    assert sum(map(len, states)) == len(whole.state_dict())
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(tensor, whole.state_dict()[name]), name
    x = torch.randn(3, CONFIG.features)
    outputs = {"x": x}
    for stage in stages:
        assert isinstance(stage, PipelineStage)
        outputs = stage(**outputs)
        told = stage.boundary({"x": TensorSpec((3, 4), torch.float32), "mask": TensorSpec((3,), torch.float32)})
        if stage is not stages[-1]:
            assert told == {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in outputs.items()}
        else:
            assert told == {}
    assert_close_values(outputs["y"], whole(x=x)["y"])


def test_the_whole_model_has_the_names_that_it_always_had() -> None:
    names = [name for name, _ in ToyModel(ToyModelConfig()).named_parameters()]
    assert names == ["unused", "layers.0.weight", "layers.1.weight"]
    assert [name for name, _ in ToyModel(ToyModelConfig()).named_buffers()] == ["scale"]


@pytest.mark.parametrize("stage", [Stage(0, 6), Stage(0, 2, (5,)), Stage(0, 2, (5, 1)), Stage(0, 2, (5, 0))])
def test_impossible_splits_are_refused(stage: Stage) -> None:
    with pytest.raises(BuildError, match=r"5 blocks cannot be split over .* take fewer stages"):
        ToyModel(CONFIG, stage)
