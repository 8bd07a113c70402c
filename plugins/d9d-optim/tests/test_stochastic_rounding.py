"""Stochastic rounding to bfloat16, and the AdamW that uses it."""

from __future__ import annotations

import math

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.base import Batch
from d9d_optim.optimizer.config import AdamWConfig, StochasticAdamWConfig
from d9d_optim.optimizer.rounding import copy_fp32_to_bf16_stochastic_, first_key, hashed, high_bits, low_bits, next_key
from d9d_optim.optimizer.stochastic_adamw import StochasticAdamW
from pydantic import ValidationError
from torch import Tensor, nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COUNT = 1 << 18
#: Five standard deviations of a mean over so many draws of a number with variance up to 1/4.
TOLERANCE = 5 * 0.5 / math.sqrt(COUNT)


def rounded(values: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator(values.device).manual_seed(seed)
    return copy_fp32_to_bf16_stochastic_(torch.empty_like(values, dtype=torch.bfloat16), values, generator)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("scale", [1.0, -(2.0**40), 2.0**-100])
def test_rounding_is_unbiased(share: float, scale: float, device: str) -> None:
    value = torch.full((COUNT,), (1 + share / 128) * scale, device=device)
    found = rounded(value).double() / scale
    assert set(found.unique().tolist()) == {1.0, 1 + 1 / 128}
    assert abs((found.mean().item() - 1) * 128 - share) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
def test_special_numbers_stay(device: str) -> None:
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32, device=device)
    assert all(rounded(bits.view(torch.float32), seed).isnan().all() for seed in range(20))
    largest = torch.finfo(torch.bfloat16).max
    exact = torch.tensor([math.inf, -math.inf, largest, -largest, 0.0, -0.0, 1.0, 2.0**-133], device=device)
    for seed in range(20):
        found = rounded(exact, seed)
        assert torch.equal(found.float(), exact)
        assert torch.equal(found.signbit(), exact.signbit())


def test_a_finite_number_never_becomes_infinite() -> None:
    beyond = torch.full((1000,), torch.finfo(torch.float32).max)
    assert torch.equal(rounded(beyond), torch.full((1000,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16))


def test_the_copy_refuses_other_formats_and_shapes() -> None:
    with pytest.raises(TypeError, match="rounds float32 to bfloat16, but got torch.float64"):
        copy_fp32_to_bf16_stochastic_(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"shape \(1,\), but the source \(2,\)"):
        copy_fp32_to_bf16_stochastic_(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(2))


def test_the_optimizers_noise_is_uniform_and_does_not_repeat() -> None:
    place, key = torch.arange(COUNT, dtype=torch.int32), torch.tensor(first_key(0, "weight"))
    random = hashed(place, key)
    streams = [
        low_bits(random),
        high_bits(random),
        low_bits(hashed(place, next_key(key))),
        low_bits(hashed(place, ~key)),
    ]
    streams += [low_bits(hashed(place, torch.tensor(first_key(0, "bias")))), low_bits(random).roll(1)]
    assert torch.corrcoef(torch.stack(streams).double()).fill_diagonal_(0).abs().max() < 5 / math.sqrt(COUNT)
    for stream in streams:
        counts = torch.bincount(stream // 256, minlength=256).double()
        chi_squared = ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum().item()
        assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


def small_updates(make: type[StochasticAdamW] | type[AdamW], config: object, steps: int = 64) -> Tensor:
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = make(config, {"weight": weight})  # type: ignore[arg-type]
    optimizer.init_state()
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step(torch.tensor(True))
    return weight.detach().double()


def test_updates_below_the_precision_of_weights_arrive_in_the_mean() -> None:
    settings = {"lr": 1e-4, "weight_decay": 0.0}  # a bit below 1 is worth 1/256
    found = small_updates(StochasticAdamW, StochasticAdamWConfig(**settings))
    assert found.mean().item() == pytest.approx(1 - 64e-4, abs=3e-4)
    assert small_updates(AdamW, AdamWConfig(**settings)).eq(1).all()  # its purpose


@pytest.mark.parametrize("state_dtype", ["float32", "parameter"])
def test_moments_follow_those_of_float32(state_dtype: str) -> None:
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    config = StochasticAdamWConfig(lr=0.0, betas=(0.9, 0.999), state_dtype=state_dtype)  # type: ignore[arg-type]
    optimizer = StochasticAdamW(config, {"weight": weight})
    optimizer.init_state()
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step(torch.tensor(True))
    square = optimizer.state()["weight/exp_avg_sq"]
    assert square.dtype == (torch.float32 if state_dtype == "float32" else torch.bfloat16)
    assert square.double().mean().item() == pytest.approx(1 - 0.999**100, rel=1e-2)


def test_another_seed_rounds_otherwise() -> None:
    settings = {"lr": 1e-4, "weight_decay": 0.0}
    first, again, other = (
        small_updates(StochasticAdamW, StochasticAdamWConfig(**settings, seed=seed), 8) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_large_tensors_are_rounded_in_pieces_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StochasticAdamWConfig(lr=1e-4)
    whole = small_updates(StochasticAdamW, settings, 3)
    monkeypatch.setattr("d9d_optim.optimizer.stochastic_adamw._PIECE_OF_CPU", 1000)
    assert torch.equal(small_updates(StochasticAdamW, settings, 3), whole)


@pytest.mark.parametrize(
    ("shape", "lengths"), [((5, 3), [2, 2, 1]), ((2, 3), [2]), ((3, 7), [1, 1, 1]), ((13,), [6, 6, 1]), ((), [1])]
)
def test_a_piece_on_a_cpu_has_as_many_rows_as_its_caches_hold(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], lengths: list[int]
) -> None:
    monkeypatch.setattr("d9d_optim.optimizer.stochastic_adamw._PIECE_OF_CPU", 6)
    found: list[list[int]] = []
    update = StochasticAdamW._update_piece

    def recorded(self: StochasticAdamW, batch: Batch, tensors: list[Tensor], *others: Tensor) -> None:
        found.append([len(tensor) for tensor in [*tensors, others[1]]])
        update(self, batch, tensors, *others)  # type: ignore[call-arg]

    monkeypatch.setattr(StochasticAdamW, "_update_piece", recorded)
    weight = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    optimizer = StochasticAdamW(StochasticAdamWConfig(), {"weight": weight})
    optimizer.init_state()
    weight.grad = torch.ones_like(weight)
    optimizer.step(torch.tensor(True))
    assert found == [[length] * 5 for length in lengths]


@pytest.mark.thorough
def test_float32_parameters_among_others_are_updated_as_adamw_does() -> None:
    both = [
        {"narrow": nn.Parameter(torch.ones(8, dtype=torch.bfloat16)), "wide": nn.Parameter(torch.ones(8))}
        for _ in range(2)
    ]
    for parameters, optimizer in (
        (both[0], StochasticAdamW(StochasticAdamWConfig(), both[0])),
        (both[1], AdamW(AdamWConfig(state_dtype="float32"), both[1])),
    ):
        optimizer.init_state()
        for parameter in parameters.values():
            parameter.grad = torch.linspace(-1, 1, 8).to(parameter.dtype)
        optimizer.step(torch.tensor(True))
    torch.testing.assert_close(both[0]["wide"], both[1]["wide"])


def test_parameters_that_it_cannot_round_are_an_error() -> None:
    with pytest.raises(BuildError, match="every trainable parameter is float32"):
        StochasticAdamW(StochasticAdamWConfig(), {"p": nn.Parameter(torch.zeros(1))})
    with pytest.raises(BuildError, match="p is torch.float16; use bfloat16"):
        StochasticAdamW(StochasticAdamWConfig(), {"p": nn.Parameter(torch.zeros(1, dtype=torch.float16))})


@pytest.mark.parametrize("field", [{"lr": -1}, {"eps": 0}, {"betas": [0.9, 1.0]}, {"weight_decay": -1}, {"seed": -1}])
def test_fields_are_checked_for_their_range(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StochasticAdamWConfig.model_validate(field)
