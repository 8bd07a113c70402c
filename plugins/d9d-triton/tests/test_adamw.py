"""The fused steps of AdamW against the references of d9d-optim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from d9d_core.kernel import OpSignature
from d9d_optim.optimizer.adamw import AdamW, master_weight, split_weight
from d9d_optim.optimizer.base import NamedOptimizer
from d9d_optim.optimizer.config import AdamWConfig, StochasticAdamWConfig
from d9d_optim.optimizer.stochastic_adamw import StochasticAdamW
from d9d_triton import adamw as module
from d9d_triton import support
from d9d_triton.adamw import FusedAdamW
from d9d_triton.kernels.adamw import divided, rounded
from torch import Tensor, nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = {"matrix": (37, 53), "vector": (5,), "scalar": (), "nothing": (0, 4), "large": (300, 301)}
Make = Callable[[dict[str, nn.Parameter]], NamedOptimizer]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_triton.adamw._BLOCK_INTERPRETED", 1 << 14)


def parameters(dtype: torch.dtype, device: str, wide: tuple[str, ...] = ()) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(x.to(device, torch.float32 if name in wide else dtype)) for name, x in drawn.items()}


def adamw(**settings: Any) -> Make:
    return lambda named: AdamW(AdamWConfig(**settings), named)


def stochastic(**settings: Any) -> Make:
    return lambda named: StochasticAdamW(StochasticAdamWConfig(**settings), named)


def steps(
    make: Make,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    fused: bool,
    gates: tuple[bool, ...] = (True, True, True),
    divisor: float | None = None,
    gradients: torch.dtype | None = None,
    wide: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Parameters and state after a few steps; the wide ones are float32, whatever the dtype of the others."""
    named = parameters(dtype, device, wide)
    optimizer: Any = make(named)
    if fused:
        (slot,) = optimizer.op_slots().values()
        slot.bind("triton", FusedAdamW(stochastic=isinstance(optimizer, StochasticAdamW)))
    optimizer.init_state()
    for index, gate in enumerate(gates):
        generator = torch.Generator().manual_seed(index + 1)
        for parameter in named.values():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None
            if gradients is not None:
                parameter.grad_dtype = gradients
            parameter.grad = drawn.to(device, gradients or parameter.dtype)
        if divisor is not None:
            optimizer.divide_gradients(torch.tensor(divisor, device=device))
        optimizer.step(torch.tensor(gate, device=device))
    return {**{name: p.detach() for name, p in named.items()}, **optimizer.state()}


def pairs(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        yield name, found[name].double().cpu(), tensor.double().cpu()


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999)])
@pytest.mark.parametrize("divisor", [None, 3.0])
def test_float32_parameters_are_updated_as_torch_does(
    device: str, betas: tuple[float, float], divisor: float | None
) -> None:
    make = adamw(lr=0.01, betas=betas, weight_decay=0.1)
    fused, plain = (steps(make, torch.float32, device, fused=f, divisor=divisor) for f in (True, False))
    for name, found, expected in pairs(fused, plain):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_dtype", ["parameter", "float32"])
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
def test_bfloat16_parameters_are_updated_to_within_their_rounding(
    device: str, state_dtype: str, gradients: torch.dtype
) -> None:
    make = adamw(lr=0.01, state_dtype=state_dtype)
    fused, plain = (steps(make, torch.bfloat16, device, fused=f, gradients=gradients) for f in (True, False))
    for name, found, expected in pairs(fused, plain):
        # Interpreted, a store cuts bits off where the device rounds; three steps of that.
        torch.testing.assert_close(found, expected, rtol=3 / 128, atol=5e-3, msg=lambda t, name=name: f"{name}: {t}")


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("divisor", [None, 4.0])  # a power of two, since the reference rounds narrow gradients
def test_master_weights_are_updated_as_float32_parameters(
    device: str, gradients: torch.dtype, divisor: float | None
) -> None:
    # Smaller than most of a bfloat16's last places.
    make = adamw(lr=1e-4, master_weights=True)
    fused, plain = (
        steps(make, torch.bfloat16, device, fused=f, gradients=gradients, divisor=divisor) for f in (True, False)
    )
    for state in (fused, plain):
        for name in SHAPES:
            state[name] = master_weight(state[name], state.pop(f"{name}/lower_bits"))
    for name, found, expected in pairs(fused, plain):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    start = parameters(torch.bfloat16, device)["matrix"].float()
    assert (fused["matrix"] != start).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_splits_a_number_as_the_reference(device: str) -> None:
    edges = torch.tensor([0x7F800001, -1, 0x7FFFFFFF, 0x7F7FFFFF, 0x3F808000, -0x407F8000, 1], dtype=torch.int32)
    specials = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    drawn = torch.randint(-(1 << 31), (1 << 31) - 1, (500,), dtype=torch.int32)
    values = torch.cat((edges.view(torch.float32), specials, drawn.view(torch.float32))).to(device)
    upper, lower = (torch.zeros(512, dtype=torch.int16, device=device) for _ in range(2))
    split_all[(1,)](values, upper, lower, SIZE=512)
    parameter, distance = torch.empty(512, dtype=torch.bfloat16, device=device), torch.empty_like(lower)
    split_weight(values, parameter, distance)
    assert torch.equal(upper, parameter.view(torch.int16))
    assert torch.equal(lower, distance)


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_dtype", ["parameter", "float32"])
def test_stochastic_rounding_draws_the_noise_of_the_reference(device: str, state_dtype: str) -> None:
    make = stochastic(lr=0.01, state_dtype=state_dtype, seed=5)
    fused, plain = (steps(make, torch.bfloat16, device, fused=f) for f in (True, False))
    for name, found, expected in pairs(fused, plain):
        if name.endswith(("/generator", "/step")):
            assert torch.equal(found, expected), name
            continue
        # Where the last bit of a float32 decides, another order of operations rounds otherwise.
        # Moments in bfloat16 hold numbers near zero, sums of larger ones, which differ in more than their last bits.
        most = 0.01 if "/" not in name else 1.0 if state_dtype == "float32" else 0.05
        assert (found != expected).double().mean().nan_to_num() <= most or expected.numel() < 10, name
        torch.testing.assert_close(found, expected, rtol=1 / 64, atol=1e-6, msg=lambda t, name=name: f"{name}: {t}")


def test_moments_in_bfloat16_are_rounded_with_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "large", (70, 3))
    make = stochastic(lr=0.01, state_dtype="parameter", seed=5)
    fused, plain = (steps(make, torch.bfloat16, fused=f, gates=(True, True)) for f in (True, False))
    for name, found, expected in pairs(fused, plain):
        # Other noise would round about half of the numbers otherwise.
        assert (found != expected).sum() <= max(1, 0.05 * expected.numel()), name
        torch.testing.assert_close(found, expected, rtol=1 / 64, atol=1e-6, msg=lambda t, name=name: f"{name}: {t}")


def test_stochastic_rounding_leaves_wide_weights_and_moments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "large", (70, 3))
    make = stochastic(lr=0.01, weight_decay=0.1)
    wide = ("matrix", "vector", "scalar")
    fused, plain = (steps(make, torch.bfloat16, fused=f, gates=(True, True), wide=wide) for f in (True, False))
    for name, found, expected in pairs(fused, plain):
        if name.startswith(wide):
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6, msg=lambda t, name=name: f"{name}: {t}")


def test_a_step_is_built_with_or_without_stochastic_rounding() -> None:
    for build, rounds in ((module.build, False), (module.build_stochastic, True)):
        built: Any = build(OpSignature("adamw", "cpu", "bfloat16", {}))
        assert isinstance(built, FusedAdamW)
        assert built._stochastic is rounds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make", [adamw(), stochastic(), adamw(master_weights=True)], ids=["adamw", "stochastic", "master_weights"]
)
def test_a_closed_gate_keeps_every_bit_whatever_the_gradients_are(make: Make, device: str) -> None:
    named = parameters(torch.bfloat16, device)
    optimizer: Any = make(named)
    (slot,) = optimizer.op_slots().values()
    slot.bind("triton", FusedAdamW(stochastic=isinstance(optimizer, StochasticAdamW)))
    optimizer.init_state()
    tensors = {**{name: p.detach() for name, p in named.items()}, **optimizer.state()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step(torch.tensor(False, device=device))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@pytest.mark.thorough
def test_noise_does_not_depend_on_how_a_tensor_is_cut_into_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = stochastic(lr=1e-4, weight_decay=0.0)
    whole = steps(make, torch.bfloat16, fused=True)
    monkeypatch.setattr("d9d_triton.adamw._BLOCK_INTERPRETED", 1 << 10)
    cut = steps(make, torch.bfloat16, fused=True)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["transposed", "unaligned"])
@pytest.mark.parametrize("masters", [False, True])
def test_tensors_that_lie_otherwise_in_memory_are_updated_alike(
    kind: str, dtype: torch.dtype, fused: bool, masters: bool
) -> None:
    if masters and dtype == torch.float32:
        pytest.skip("they are their own master weights")
    found = []
    drawn = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    for moved in (False, True):
        plain = drawn.clone()
        if moved and kind == "transposed":
            plain = plain.t().contiguous().t()
        if moved and kind == "unaligned":
            plain = torch.empty(65, dtype=dtype)[1:].view(8, 8).copy_(plain)
        named = {"weight": nn.Parameter(plain)}
        stochastic_one = dtype == torch.bfloat16 and not masters
        make = stochastic(lr=0.1) if stochastic_one else adamw(lr=0.1, master_weights=masters)
        optimizer: Any = make(named)
        if fused:
            optimizer.op_slots()["step"].bind("triton", FusedAdamW(stochastic=stochastic_one))
        optimizer.init_state()
        for _ in range(2):
            named["weight"].grad = torch.linspace(-1, 1, 64).view(8, 8).to(dtype)
            optimizer.step(torch.tensor(True))
        found.append(named["weight"].detach().clone())
    assert torch.equal(*found)
    assert not torch.equal(found[0], drawn)


@triton.jit
def split_all(values, upper, lower, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    first, second = divided(tl.load(values + at))
    tl.store(upper + at, first)
    tl.store(lower + at, second)


@triton.jit
def round_all(values, noise, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out + at, rounded(tl.load(values + at), tl.load(noise + at).to(tl.uint32)))


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_keeps_nan_infinities_and_the_largest_number(device: str) -> None:
    largest = torch.finfo(torch.bfloat16).max
    bits = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat((bits, torch.tensor([torch.inf, -torch.inf, largest, -largest, 1.0, 3.4e38]))).to(device)
    out = torch.zeros(8, dtype=torch.int16, device=device)
    for noise in (0, 0xFFFF):
        round_all[(1,)](values, torch.full((8,), noise, dtype=torch.int32, device=device), out, SIZE=8)
        found = out.view(torch.bfloat16)
        assert found[:2].isnan().all()
        assert found[2:7].tolist() == [torch.inf, -torch.inf, largest, -largest, 1.0]
        assert found[7].isfinite()


def test_what_it_does_not_compute_is_left_to_torch() -> None:
    for name in ("amsgrad", "maximize"):
        decision = support.adamw(OpSignature("adamw", "cuda", "float32", {name: True}))
        assert (decision.accept, decision.reason) == (False, f"does not compute {name}")
    assert support.adamw(OpSignature("adamw", "cuda", "bfloat16", {})).priority > 0
    assert not support.adamw(OpSignature("adamw", "cuda", "float64", {})).accept
    assert not support.stochastic_adamw(OpSignature("stochastic_adamw", "cuda", "float16", {})).accept
    assert not support.adamw(OpSignature("adamw", "xpu", "float32", {})).accept


def sharded(dim: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Whole weight, moment and generator after two steps of a tensor that two ranks share."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    drawn = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for is_split in (False, True):
        weight = nn.Parameter(distribute_tensor(drawn, mesh, [Shard(dim)]) if is_split else drawn.clone())
        optimizer = StochasticAdamW(StochasticAdamWConfig(lr=0.01, state_dtype="parameter"), {"weight": weight})
        optimizer.op_slots()["step"].bind("triton", FusedAdamW(stochastic=True))
        optimizer.init_state()
        for step in range(2):
            gradient = torch.randn(7, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
            weight.grad = distribute_tensor(gradient, mesh, [Shard(dim)]) if is_split else gradient
            optimizer.step(torch.tensor(True))
        tensors = [weight.detach(), optimizer.state()["weight/exp_avg"], optimizer.state()["weight/generator"]]
        found.append(tuple(t.full_tensor() if isinstance(t, DTensor) else t for t in tensors))
    return found  # type: ignore[return-value]


@pytest.mark.full
def test_shards_of_rows_draw_the_noise_of_the_whole_tensor(world: Callable[[int], Any]) -> None:
    for whole, shards in world(2).run(sharded, 0):
        assert all(torch.equal(a, b) for a, b in zip(whole, shards, strict=True))


@pytest.mark.full
def test_shards_of_columns_are_left_to_the_reference_with_the_same_noise(world: Callable[[int], Any]) -> None:
    for whole, shards in world(2).run(sharded, 1):
        for a, b in zip(whole, shards, strict=True):
            torch.testing.assert_close(a, b, rtol=1 / 128, atol=1e-6)
            assert (a != b).double().mean() < 0.1
