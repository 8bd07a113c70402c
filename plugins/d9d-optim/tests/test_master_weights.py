"""Float32 weights, of which parameters have the upper bits and the state of ``adamw`` the lower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_optim.optimizer.adamw import AdamW, master_weight, split_weight
from d9d_optim.optimizer.config import AdamWConfig, GroupRule
from pydantic import ValidationError
from torch import Tensor, nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = {"matrix": (37, 53), "vector": (5,), "scalar": (), "nothing": (0, 4)}
OPEN = torch.tensor(True)


def parts_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    parameter, lower = torch.empty_like(weight, dtype=torch.bfloat16), torch.empty_like(weight, dtype=torch.int16)
    split_weight(weight, parameter, lower)
    return parameter, lower


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_is_split_without_loss_into_the_nearest_bfloat16_and_a_distance(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 20,), generator=generator, dtype=torch.int32)
    ties = (torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16) + 0x8000
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.finfo(torch.float32).max, 1e-45])
    weight = torch.cat((bits.view(torch.float32), ties.view(torch.float32), edges)).to(device)
    parameter, lower = parts_of(weight)
    numbers = ~weight.isnan()
    assert torch.equal(master_weight(parameter, lower).view(torch.int32)[numbers], weight.view(torch.int32)[numbers])
    assert master_weight(parameter, lower)[~numbers].isnan().all()
    assert parameter[~numbers].isnan().all()
    found, (finite, rounded) = parameter[numbers].double(), (weight[numbers].double(), weight[numbers].bfloat16())
    # As near as torch's rounding; of a tie, one of both neighbours.
    assert torch.equal((found - finite).abs().nan_to_num(), (rounded.double() - finite).abs().nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_bfloat16_parameters_train_as_float32_ones_bit_for_bit(
    device: str, gradients: torch.dtype, amsgrad: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    runs = []
    for dtype in (torch.bfloat16, torch.float32):
        named = {name: nn.Parameter(tensor.to(device, dtype, copy=True)) for name, tensor in drawn.items()}
        # Most updates are far below the precision of the parameters.
        config = AdamWConfig(lr=1e-5, amsgrad=amsgrad, master_weights=dtype == torch.bfloat16)
        optimizer = AdamW(config, named)
        optimizer.init_state()
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            for parameter in named.values():
                gradient = torch.randn(parameter.shape, generator=generator).to(device, gradients)
                parameter.grad = None
                parameter.grad_dtype = gradients if dtype == torch.bfloat16 else dtype
                parameter.grad = gradient.to(parameter.grad_dtype)
            optimizer.divide_gradients(torch.tensor(2.0, device=device))
            optimizer.step(torch.tensor(step != 3, device=device))
        runs.append((named, optimizer.state()))
    (narrow, state), (wide, expected) = runs
    for name, weight in wide.items():
        assert torch.equal(master_weight(narrow[name].detach(), state[f"{name}/lower_bits"]), weight), name
    assert state.keys() - expected.keys() == {f"{name}/lower_bits" for name in SHAPES}
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    # The same moves, rounded to bfloat16 each time, go nowhere.
    assert not torch.equal(wide["matrix"], drawn["matrix"].to(device).float())
    assert (narrow["matrix"].cpu() != drawn["matrix"]).double().mean() < 0.2


def test_a_parameter_that_is_loaded_later_is_its_own_master_weight() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = AdamW(AdamWConfig(lr=0.0, master_weights=True), {"weight": parameter})
    optimizer.init_state()
    loaded = torch.tensor([1.0, -2.5, 3e-3, 1e20], dtype=torch.bfloat16)
    parameter.detach().copy_(loaded)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(OPEN)
    assert torch.equal(parameter.detach(), loaded)
    assert not optimizer.state()["weight/lower_bits"].any()


def mixed(*dtypes: torch.dtype) -> dict[str, nn.Parameter]:
    return {f"layer.{index}": nn.Parameter(torch.ones(3, dtype=dtype)) for index, dtype in enumerate(dtypes)}


def test_float32_parameters_among_them_are_their_own_master_weights() -> None:
    named = mixed(torch.bfloat16, torch.float32, torch.bfloat16)
    groups = (GroupRule(match="layer.2", lr_scale=0.5),)
    optimizer = AdamW(AdamWConfig(lr=1e-4, master_weights=True, groups=groups), named)
    optimizer.init_state()
    assert sorted(name for name in optimizer.state() if name.endswith("lower_bits")) == [
        "layer.0/lower_bits", "layer.2/lower_bits",
    ]  # fmt: skip
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(OPEN)
    weights = [
        master_weight(named[name].detach(), optimizer.state()[f"{name}/lower_bits"]) for name in ("layer.0", "layer.2")
    ]
    assert torch.equal(weights[0], named["layer.1"].detach())
    assert torch.all(weights[0] < weights[1])
    described = optimizer.describe()
    assert sorted(name for group in described.values() for name in group["parameters"]) == sorted(named)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((torch.float32,), "every trainable parameter is float32.*set precision.parameters to bfloat16"),
        ((torch.bfloat16, torch.float16), "layer.1 is float16; only bfloat16 parameters can have master"),
    ],
)
def test_parameters_that_have_no_master_weights_are_refused(dtypes: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        AdamW(AdamWConfig(master_weights=True), mixed(*dtypes))


def test_narrow_moments_beside_them_are_refused() -> None:
    with pytest.raises(ValidationError, match="master_weights requires float32 moments; remove state_dtype"):
        AdamWConfig(master_weights=True, state_dtype="parameter")
    assert AdamWConfig(master_weights=True, state_dtype="float32").wide_state
