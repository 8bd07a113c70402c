from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_optim.optimizer.adam import Adam
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.base import NamedOptimizer
from d9d_optim.optimizer.config import AdamConfig, AdamWConfig, GroupRule, LionConfig, SGDConfig
from d9d_optim.optimizer.lion import Lion
from d9d_optim.optimizer.sgd import SGD
from torch import Tensor, nn

SHAPES = {"embed.weight": (7, 5), "layer.weight": (5, 5), "layer.bias": (5,), "norm.weight": (5,)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]
OPTIMIZERS = ["adamw", "adam", "adam_decoupled", "sgd", "sgd_momentum", "sgd_nesterov"]
ADAMS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {"amsgrad": True, "maximize": True},
    "adam_decoupled": {"decoupled_weight_decay": True, "amsgrad": True},
}

pytestmark = [pytest.mark.smoke, pytest.mark.parametrize("device", DEVICES)]


def parameters(device: str, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for name, shape in SHAPES.items()
    }


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)


def gate(device: str, value: bool = True) -> Tensor:
    return torch.tensor(value, device=device)


def ours(kind: str, named: dict[str, nn.Parameter], state_dtype: str = "parameter") -> NamedOptimizer:
    shared = {"state_dtype": state_dtype}
    if kind == "adamw":
        return AdamW(AdamWConfig(lr=0.01, weight_decay=0.1, **shared), named)
    if kind in ADAMS:
        return Adam(AdamConfig(lr=0.01, weight_decay=0.1, **ADAMS[kind], **shared), named)
    momentum = 0.0 if kind == "sgd" else 0.9
    nesterov = kind == "sgd_nesterov"
    fields = {"momentum": momentum, "nesterov": nesterov, "maximize": kind == "sgd_momentum"}
    return SGD(SGDConfig(lr=0.1, weight_decay=0.01, **fields, **shared), named)


def theirs(kind: str, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    decay = 0.1 if kind in ADAMS else 0.01
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    if kind in ADAMS:
        return torch.optim.Adam(groups, lr=0.01, betas=(0.9, 0.95), fused=True, **ADAMS[kind])
    momentum = 0.0 if kind == "sgd" else 0.9
    fields = {"momentum": momentum, "nesterov": kind == "sgd_nesterov", "maximize": kind == "sgd_momentum"}
    return torch.optim.SGD(groups, lr=0.1, fused=True, **fields)


def velocity_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    velocity = optimizer.state[parameter].get("momentum_buffer")
    return torch.zeros(()) if velocity is None else velocity


def bits(tensors: dict[str, Tensor] | dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_equal_torch_bit_for_bit(kind: str, dtype: torch.dtype, device: str) -> None:
    mine, other = parameters(device, dtype), parameters(device, dtype)
    optimizer, reference = ours(kind, mine), theirs(kind, other)
    optimizer.init_state()
    # torch 2.11 leaves narrow parameters on a CPU as they are (pytorch/pytorch#191763); float32 is the reference.
    exact = device == "cpu" and dtype == torch.bfloat16 and kind not in ADAMS
    if exact:
        other = {name: nn.Parameter(parameter.float()) for name, parameter in other.items()}
        reference = theirs(kind, other)
    for step in range(5):
        set_gradients(mine, step)
        for name, parameter in other.items():
            gradient = mine[name].grad
            assert gradient is not None
            parameter.grad = gradient.to(parameter.dtype)
        factor = 1.0 / (step + 1)
        optimizer.set_lr_factor(factor)
        for group in reference.param_groups:
            group["lr"] = (0.01 if kind in ADAMS else 0.1) * factor
        optimizer.step(gate(device))
        reference.step()
        with torch.no_grad():
            for tensor in [*other.values(), *(velocity_of(reference, p) for p in other.values())] if exact else []:
                tensor.copy_(tensor.to(dtype))
        assert_same_bits(bits(mine), {name: tensor.to(dtype) for name, tensor in bits(other).items()})


def test_state_names_are_parameter_and_slot(device: str) -> None:
    optimizer = ours("adamw", parameters(device, torch.bfloat16))
    optimizer.init_state()
    assert set(optimizer.state()) == {f"{name}/{slot}" for name in SHAPES for slot in ("exp_avg", "exp_avg_sq", "step")}
    assert optimizer.state()["layer.bias/exp_avg"].dtype == torch.bfloat16
    assert optimizer.state()["layer.bias/step"].dtype == torch.float32
    plain = ours("sgd", parameters(device))
    plain.init_state()
    assert plain.state() == {}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_float32_state_of_bfloat16_parameters_rounds_each_update_once(kind: str, device: str) -> None:
    mine = parameters(device, torch.bfloat16)
    exact = {name: nn.Parameter(tensor.float()) for name, tensor in mine.items()}
    optimizer, reference = ours(kind, mine, "float32"), ours(kind, exact)
    optimizer.init_state()
    reference.init_state()
    for step in range(4):
        set_gradients(mine, step)
        for name, parameter in exact.items():
            parameter.grad = mine[name].grad.float()
        refused = step == 2
        optimizer.step(gate(device, not refused))
        reference.step(gate(device, not refused))
        with torch.no_grad():
            for parameter in exact.values():
                parameter.copy_(parameter.bfloat16())
        assert_same_bits({name: tensor.float() for name, tensor in bits(mine).items()}, bits(exact))
    assert_same_bits(bits(optimizer.state()), bits(reference.state()))
    assert all(tensor.dtype == torch.bfloat16 for tensor in mine.values())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_float32_state_of_bfloat16_parameters_follows_the_schedule_as_torch_does(kind: str, device: str) -> None:
    mine = parameters(device, torch.bfloat16)
    exact = {name: nn.Parameter(tensor.float()) for name, tensor in mine.items()}
    optimizer, reference = ours(kind, mine, "float32"), theirs(kind, exact)
    optimizer.init_state()
    for step in range(4):
        set_gradients(mine, step)
        for name, parameter in exact.items():
            parameter.grad = mine[name].grad.float()
        factor = (0.0, 0.5, 1.0, 0.1)[step]
        optimizer.set_lr_factor(factor)
        for group in reference.param_groups:
            group["lr"] = (0.01 if kind in ADAMS else 0.1) * factor
        optimizer.step(gate(device))
        reference.step()
        with torch.no_grad():
            for parameter in exact.values():
                parameter.copy_(parameter.bfloat16())
        assert_same_bits({name: tensor.float() for name, tensor in bits(mine).items()}, bits(exact))


def test_float32_state_keeps_slow_averages_moving(device: str) -> None:
    second_moment = {}
    for state_dtype in ("parameter", "float32"):
        parameter = nn.Parameter(torch.ones(1, device=device, dtype=torch.bfloat16))
        optimizer = AdamW(AdamWConfig(lr=0, betas=(0.9, 0.999), state_dtype=state_dtype), {"p": parameter})
        optimizer.init_state()
        for _ in range(1000):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step(gate(device))
        second_moment[state_dtype] = float(optimizer.state()["p/exp_avg_sq"])
    assert second_moment["float32"] == pytest.approx(1 - 0.999**1000, rel=1e-3)
    assert second_moment["parameter"] < 0.5  # the purpose of the setting


def test_float32_state_never_narrows_a_parameter(device: str) -> None:
    named = parameters(device, torch.float64)
    optimizer = ours("adamw", named, "float32")
    optimizer.init_state()
    assert optimizer.state()["layer.bias/exp_avg"].dtype == torch.float64


def test_adamw_decays_weights_apart_from_the_gradient(device: str) -> None:
    named = parameters(device)
    optimizer = AdamW(AdamWConfig(lr=0.5, weight_decay=0.25), named)
    optimizer.init_state()
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    before = bits(named)
    optimizer.step(gate(device))
    torch.testing.assert_close(named["layer.weight"].detach(), before["layer.weight"] * (1 - 0.5 * 0.25))
    assert torch.equal(named["layer.bias"].detach(), before["layer.bias"])


def test_frozen_parameters_have_no_state(device: str) -> None:
    named = parameters(device)
    named["embed.weight"].requires_grad_(False)
    optimizer = ours("adamw", named)
    optimizer.init_state()
    assert not any(name.startswith("embed") for name in optimizer.state())


def test_step_before_init_state_is_an_error(device: str) -> None:
    optimizer = ours("adamw", parameters(device))
    with pytest.raises(BuildError, match="init_state"):
        optimizer.step(gate(device))
    with pytest.raises(BuildError, match="init_state"):
        optimizer.state()


def test_lr_scale_multiplies_the_base_rate_of_its_group_only(device: str) -> None:
    named = parameters(device)
    optimizer = SGD(SGDConfig(lr=0.5, groups=(GroupRule(match="embed.*", lr_scale=0.1),)), named)
    optimizer.init_state()
    optimizer.set_lr_factor(0.5)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    before = bits(named)
    optimizer.step(gate(device))
    torch.testing.assert_close(named["layer.weight"].detach(), before["layer.weight"] - 0.25)
    torch.testing.assert_close(named["embed.weight"].detach(), before["embed.weight"] - 0.025)
    assert optimizer.lr == 0.25


@pytest.mark.parametrize("state_dtype", ["parameter", "float32"])
def test_gradients_may_be_wider_than_parameters(state_dtype: str, device: str) -> None:
    narrow, wide = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16, device=device)) for _ in "ab")
    wide.grad_dtype = torch.float32
    gradient = torch.linspace(-1, 1, 8, device=device).bfloat16()
    narrow.grad, wide.grad = gradient, gradient.float()
    for parameter in (narrow, wide):
        optimizer = AdamW(AdamWConfig(lr=0.1, state_dtype=state_dtype), {"p": parameter})
        optimizer.init_state()
        optimizer.step(torch.tensor(True, device=device))
    assert not torch.equal(narrow, torch.ones_like(narrow))
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_division_in_the_step_gives_the_bits_of_division_before_it(kind: str, dtype: torch.dtype, device: str) -> None:
    for accumulated in DTYPES:
        before, inside = parameters(device, dtype), parameters(device, dtype)
        for named in (before, inside):
            optimizer = ours(kind, named)
            optimizer.init_state()
            for step, divisor in enumerate((1.0, 1.37, 30.0)):
                for parameter in named.values():
                    parameter.grad_dtype = accumulated
                    parameter.grad = None
                generator = torch.Generator().manual_seed(step)
                for parameter in named.values():
                    gradient = torch.randn(parameter.shape, generator=generator).to(device, accumulated)
                    parameter.grad = gradient if named is inside else gradient / torch.tensor(divisor, device=device)
                if named is inside:
                    optimizer.divide_gradients(torch.tensor(divisor, device=device))
                optimizer.step(gate(device))
        assert_same_bits(bits(inside), bits(before))


def test_a_divisor_holds_for_one_step(device: str) -> None:
    parameter = nn.Parameter(torch.zeros(3, device=device))
    optimizer = SGD(SGDConfig(lr=1.0), {"p": parameter})
    optimizer.init_state()
    optimizer.divide_gradients(torch.tensor(4.0, device=device))
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(gate(device))
    assert parameter.tolist() == [-1.25] * 3


def test_dampened_momentum_equals_that_of_torch(device: str) -> None:
    mine, other = parameters(device), parameters(device)
    optimizer = SGD(SGDConfig(lr=0.1, weight_decay=0.01, momentum=0.9, dampening=0.3, maximize=True), mine)
    optimizer.init_state()
    groups = [
        {"params": [p for p in other.values() if (p.ndim >= 2) == decays], "weight_decay": 0.01 if decays else 0.0}
        for decays in (True, False)
    ]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.3, maximize=True, foreach=False)
    for step in range(4):
        set_gradients(mine, step)
        set_gradients(other, step)
        optimizer.step(gate(device, step != 1))
        if step != 1:
            reference.step()
    assert_same_bits(bits(mine), bits(other))


def test_dampened_momentum_divides_gradients_before_it_uses_them(device: str) -> None:
    parameter = nn.Parameter(torch.tensor([1.0], device=device))
    optimizer = SGD(SGDConfig(lr=0.5, momentum=0.5, dampening=0.75), {"p": parameter})
    optimizer.init_state()
    for gradient, divisor, velocity in ((8.0, 4.0, 2.0), (6.0, 2.0, 0.5 * 2.0 + 0.25 * 3.0)):
        parameter.grad = torch.tensor([gradient], device=device)
        optimizer.divide_gradients(torch.tensor(divisor, device=device))
        optimizer.step(gate(device))
        assert optimizer.state()["p/momentum_buffer"].tolist() == [velocity]
    assert parameter.tolist() == [1.0 - 0.5 * (2.0 + 1.75)]


def test_lion_follows_the_algorithm_of_its_paper(device: str) -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 8, device=device, dtype=torch.float64).view(2, 4))
    weight, average = parameter.detach().clone(), torch.zeros_like(parameter)
    optimizer = Lion(LionConfig(lr=0.1, weight_decay=0.5), {"p": parameter})
    optimizer.init_state()
    for step in range(4):
        set_gradients({"p": parameter}, step)
        gradient = parameter.grad
        assert gradient is not None
        optimizer.step(gate(device))
        weight = weight - 0.1 * ((0.9 * average + 0.1 * gradient).sign() + 0.5 * weight)
        average = 0.99 * average + 0.01 * gradient
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state()["p/exp_avg"], average, rtol=1e-12, atol=1e-12)
