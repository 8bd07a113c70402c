"""Sizes of deviations, their limits, and comparisons of directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from d9d_verify.deviations import FLOORS, MARGIN, Deviation, Limits, deviations
from d9d_verify.measurement import Measurement
from d9d_verify.tolerances import TOLERANCES, compare_directions
from torch import Tensor

EPS = torch.finfo(torch.float32).eps


def measured(steps: int = 1, tensors: Mapping[str, Tensor] | None = None, **numbers: float) -> Measurement:
    """Measurement with equal numbers in each step, except for those given."""
    found = {f"{step}/{name}": 1.0 for step in range(steps) for name in ("loss", "tokens", "grad_norm", "lr")}
    named = {name.replace("__", "/"): value for name, value in numbers.items()}
    return Measurement(found | {name.removeprefix("at_"): value for name, value in named.items()}, dict(tensors or {}))


def sizes(one: Measurement, other: Measurement) -> dict[tuple[str, str, int], float]:
    """Sizes above zero of all deviations."""
    return {(d.kind, d.name, d.step): d.size for d in deviations(one, other) if d.size != 0}


def test_numbers_deviate_relatively_in_their_own_step() -> None:
    one = measured(2, at_1__loss=1.1, at_0__grad_norm=0.9, at_1__lr=4.0)
    other = measured(2, at_1__lr=2.0)
    found = sizes(one, other)
    assert found == {
        ("grad_norm", "", 0): pytest.approx(0.1), ("loss", "", 1): pytest.approx(0.1), ("lr", "", 1): 1.0,
    }  # fmt: skip


def test_terms_of_a_loss_deviate_apart_and_one_token_more_is_a_deviation() -> None:
    terms = {"at_0__loss__hard": 2.0, "at_0__loss__soft": 3.0}
    one = measured(at_0__tokens=41.0, **(terms | {"at_0__loss__soft": 3.3}))
    assert sizes(one, measured(at_0__tokens=40.0, **terms)) == {
        ("loss", "the loss term soft", 0): pytest.approx(0.1), ("tokens", "", 0): 0.025,
    }  # fmt: skip
    assert FLOORS[torch.bfloat16]["tokens"] == 0.0


@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, 1.0, math.inf),
        (0.0, 0.0, 0.0),
        (1e-12, 0.0, 1.0),
        (-1.0, -2.0, 0.5),
    ],
)
def test_numbers_that_are_not_finite_are_equal_only_to_themselves(one: float, other: float, size: float) -> None:
    assert sizes(measured(at_0__loss=one), measured(at_0__loss=other)).get(("loss", "", 0), 0.0) == size


def model(**steps: Any) -> dict[str, Tensor]:
    """Tensors by dotted names, such as ``at_0__model__a``."""
    return {name.removeprefix("at_").replace("__", "/"): torch.tensor(values) for name, values in steps.items()}


def test_gradients_deviate_in_angle_and_length() -> None:
    common = model(start__model__a=[0.0, 0.0], at_0__model__a=[0.0, 0.0])
    one = measured(tensors=common | model(at_0__gradients__a=[0.0, 3.0]))
    other = measured(tensors=common | model(at_0__gradients__a=[4.0, 0.0]))
    assert sizes(one, other) == {("angle", "a", 0): 1.0, ("length", "a", 0): 0.25}


def test_clipping_of_each_measurement_is_undone_before_lengths_are_compared() -> None:
    tensors = model(start__model__a=[1.0], at_0__model__a=[1.0], at_0__gradients__a=[1.0])
    one = measured(tensors=tensors, start__max_norm=1.0, at_0__grad_norm=4.0)
    other = measured(tensors=tensors, start__max_norm=1.0, at_0__grad_norm=2.0)
    found = sizes(one, other)
    assert found["length", "a", 0] == pytest.approx(0.5)
    assert found["grad_norm", "", 0] == 1.0
    small = measured(tensors=tensors, start__max_norm=1.0, at_0__grad_norm=0.5)  # was not clipped
    smaller = measured(tensors=tensors, start__max_norm=1.0, at_0__grad_norm=0.25)
    assert ("length", "a", 0) not in sizes(small, smaller)


def test_updates_are_compared_from_the_weights_before_them() -> None:
    gradients = model(at_0__gradients__a=[1.0, 0.0], at_1__gradients__a=[1.0, 0.0])
    other = model(start__model__a=[1.0, 1.0], at_0__model__a=[0.5, 1.0], at_1__model__a=[0.25, 1.0])
    one = model(start__model__a=[1.0, 1.0], at_0__model__a=[0.25, 1.0], at_1__model__a=[0.0, 1.0])
    found = sizes(measured(2, gradients | one), measured(2, gradients | other))
    # Step 0: 0.75 for 0.5; step 1: 0.25 in both, from other weights.
    spare = EPS * math.sqrt(1 + 2 / 1000)
    assert found.pop(("update", "a", 0)) == pytest.approx((0.25 - spare) / 0.5)
    assert found.pop(("weight", "a", 0)) == pytest.approx(1 - math.hypot(0.25, 1) / math.hypot(0.5, 1) - EPS)
    assert found.pop(("weight", "a", 1)) == pytest.approx(1 - 1 / math.hypot(0.25, 1) - EPS)
    assert found == {}


def test_rounding_of_one_element_is_no_deviation_of_an_update_and_that_of_many_is() -> None:
    gradients = model(at_0__gradients__a=[1.0] * 4)
    before = model(start__model__a=[1.0] * 4)

    def after(*bits: int) -> Measurement:
        return measured(tensors=gradients | before | model(at_0__model__a=[0.75 + bit * EPS / 2 for bit in bits]))

    reference = after(0, 0, 0, 0)
    assert sizes(after(1, 0, 0, 0), reference) == {}
    assert sizes(after(1, 1, 1, 1), reference).keys() == {("update", "a", 0), ("weight", "a", 0)}


def test_a_parameter_of_one_element_may_be_rounded_by_two_bits_of_its_length() -> None:
    gradients = model(at_0__gradients__a=[1.0], start__model__a=[2.0])
    one, other = (measured(tensors=gradients | model(at_0__model__a=[value])) for value in (1.0 + 4 * EPS, 1.0))
    found = sizes(one, other)
    assert found["weight", "a", 0] == pytest.approx(2 * EPS)
    assert found["update", "a", 0] == pytest.approx(4 * EPS - EPS * math.sqrt(1 + 1 / 1000))


def test_a_buffer_that_stays_where_it_should_change_is_wrong_by_any_measure() -> None:
    start = model(start__model__b=[2.0], at_0__model__b=[2.0 + 1e-6])
    reference = measured(tensors=start)
    assert sizes(reference, reference) == {}
    stuck = measured(tensors=start | model(at_0__model__b=[2.0]))
    assert sizes(stuck, reference) == {("buffer", "b", 0): math.inf}
    moved = measured(tensors=start | model(at_0__model__b=[3.0]))
    assert sizes(moved, reference) == {("buffer", "b", 0): pytest.approx(0.5, rel=1e-5)}


def test_optimizer_state_deviates_beyond_the_rounding_of_an_element() -> None:
    reference = measured(tensors=model(at_0__optimizer__a__m=[4.0, 0.0, 3.0]))
    spare = 4 * EPS * math.sqrt(1 + 3 / 1000)
    off = measured(tensors=model(at_0__optimizer__a__m=[4.0, 1.0, 3.0]))
    assert sizes(off, reference) == {("state", "a/m", 0): pytest.approx((1 - spare) / 5)}
    rounded = measured(tensors=model(at_0__optimizer__a__m=[4.0 + 4 * EPS, 0.0, 3.0]))
    assert sizes(rounded, reference) == {}
    counts = measured(tensors=model(at_0__optimizer__a__n=[4]))
    assert sizes(measured(tensors=model(at_0__optimizer__a__n=[5])), counts) == {("state", "a/n", 0): 0.25}


def test_lower_bits_of_master_weights_wrap_around() -> None:
    def lower(value: int) -> Measurement:
        return measured(tensors={"0/optimizer/a/low": torch.tensor([value], dtype=torch.int16)})

    assert sizes(lower(-32768), lower(32767)) == {("state", "a/low", 0): 1 / 32767}


@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        (1.0, 0.0, math.inf), (math.nan, 1.0, math.inf), (1.0, math.inf, math.inf), (math.inf, math.inf, math.inf),
        (1.0, math.nan, math.inf),
    ],
)  # fmt: skip
def test_a_state_that_should_be_zero_or_finite_is_wrong_by_any_measure(one: float, other: float, size: float) -> None:
    values = (measured(tensors=model(at_0__optimizer__a__m=[value])) for value in (one, other))
    assert sizes(*values) == {("state", "a/m", 0): size}


def test_series_are_compared_at_the_end_and_tables_as_vectors() -> None:
    numbers = {
        "end/load[0]": 3.0,
        "end/load[1]": math.nan,
        "end/load[2]": 4.0,
        "end/accuracy": 0.5,
        "end/eval/loss": 2.0,
    }
    one, other = measured(2), measured(2)
    other.numbers |= numbers
    one.numbers |= numbers | {"end/load[2]": 5.0, "end/accuracy": 0.25, "end/eval/loss": 3.0}
    assert sizes(one, other) == {
        ("series", "load", 2): pytest.approx(0.2), ("series", "accuracy", 2): 0.5, ("loss", "eval/loss", 2): 0.5,
    }  # fmt: skip
    one.numbers |= numbers | {"end/load[1]": 1.0}
    assert sizes(one, other) == {("series", "load", 2): math.inf}


def test_limits_are_a_multiple_of_what_correct_runs_show_for_a_value_and_at_least_the_most_of_its_kind() -> None:
    limits = Limits(FLOORS[torch.float32], {("angle", "a"): 1e-3, ("angle", "b"): 1e-2, ("loss", ""): 1e-9})
    assert limits.allowed(Deviation("angle", "a", 0, 0.0)) == 1e-2
    assert limits.allowed(Deviation("angle", "b", 0, 0.0)) == MARGIN * 1e-2
    assert limits.allowed(Deviation("angle", "c", 0, 0.0)) == 1e-2
    assert limits.allowed(Deviation("loss", "", 0, 0.0)) == 5e-6
    assert limits.allowed(Deviation("state", "a", 0, 0.0)) == 1e-5


def test_limits_take_the_largest_finite_deviation_of_any_correct_run_and_step() -> None:
    reference = measured(2)
    runs = [
        measured(2, at_0__loss=1.25),
        measured(2, at_0__loss=1.125, at_1__loss=1.5),
        measured(2, at_0__loss=math.nan),
    ]
    limits = Limits.of(torch.bfloat16, reference, runs)
    assert limits.seen["loss", ""] == 0.5
    assert limits.floors is FLOORS[torch.bfloat16]


def test_minimum_limits_are_far_tighter_in_float32_than_in_bfloat16() -> None:
    assert FLOORS.keys() == {torch.float32, torch.bfloat16}
    narrow, wide = FLOORS[torch.bfloat16], FLOORS[torch.float32]
    assert all(wide[kind] <= narrow[kind] / 9 for kind in wide if kind != "lr")
    assert wide["lr"] == narrow["lr"]


@pytest.mark.parametrize(
    ("one", "other", "by", "angle", "length"),
    [
        ([1.0, 0.0], [2.0, 0.0], "tensor", 0.0, 0.5),
        ([1.0, 0.0], [-1.0, 0.0], "tensor", 2.0, 0.0),
        ([0.0, 0.0], [0.0, 0.0], "tensor", 0.0, 0.0),
        ([0.0, 0.0], [0.0, 3.0], "tensor", 1.0, 1.0),
        ([[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]], "row", 0.0, 0.0),
        ([[4.0, 0.0], [0.0, 1.0]], [[4.0, 0.0], [1.0, 0.0]], "row", 1.0, 0.0),
        ([[4.0, 0.0], [0.0, 1.0]], [[4.0, 0.0], [0.0, 4.0]], "row", 0.0, 0.75),
        ([[[4.0, 0.0, 0.0], [0.0, 1.0, 0.0]]], [[[4.0, 0.0, 0.0], [1.0, 0.0, 0.0]]], "row", 1.0, 0.0),
        ([4.0, 1.0], [4.0, 1.0], "row", 0.0, 0.0),
        (2.0, 3.0, "row", 0.0, 1 / 3),
    ],
)
def test_directions_differ_by_angle_and_by_length(one: Any, other: Any, by: Any, angle: float, length: float) -> None:
    found = compare_directions(torch.tensor(one), torch.tensor(other), by)
    assert found == (pytest.approx(angle, abs=1e-15), pytest.approx(length))


def test_tiny_angles_are_exact() -> None:
    angle, _ = compare_directions(torch.tensor([1.0, 1e-9]), torch.tensor([1.0, 0.0]))
    assert angle == pytest.approx(5e-19, rel=1e-6, abs=0)
    # Beyond 60 degrees, one minus the cosine is exact and half the squared distance is the same.
    angle, _ = compare_directions(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0]))
    assert angle == pytest.approx(1 - 1 / math.sqrt(10))


def test_tolerances_widen_with_narrower_dtypes() -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for name in ("rtol", "atol", "angle", "norm"):
        values = [getattr(TOLERANCES[dtype], name) for dtype in dtypes]
        assert values == sorted(values)
        assert values[0] < values[-1]


def rounded(*seeds: int, times: float = 1.0) -> list[Measurement]:
    """Runs with the gradient ``a`` and a gradient ``zero`` that is only rounding, of random directions."""
    runs = []
    for seed in seeds:
        run = measured(2)
        for step in (0, 1):
            noise = torch.randn(64, generator=torch.Generator().manual_seed(seed * 2 + step))
            run.tensors[f"{step}/gradients/zero"] = 1e-3 * times * noise / noise.norm()
            run.tensors[f"{step}/model/zero"] = torch.zeros(64)
        run.tensors["start/model/zero"] = torch.zeros(64)
        runs.append(run)
    return runs


def test_a_gradient_that_is_only_rounding_is_compared_by_its_length_and_widens_no_limit() -> None:
    reference, *sound = rounded(1, 2, 3)
    limits = Limits.of(torch.float32, reference, sound)
    assert limits.noise == {"zero": pytest.approx(1e-3)}
    assert limits.allowed(Deviation("angle", "a", 0, 0.0)) == FLOORS[torch.float32]["angle"]
    for times in (0.1, 9.0, 11.0):
        (other,) = rounded(4, times=times)
        found = [d for d in deviations(other, reference, limits.noise) if d.name == "zero" and d.size]
        assert {(d.kind, d.step, round(d.size, 4)) for d in found} == {("noise", 0, times), ("noise", 1, times)}
        assert [d.size <= limits.allowed(d) for d in found] == [times < 10] * 2


def test_the_length_of_a_gradient_that_is_only_rounding_is_its_largest_before_clipping() -> None:
    reference, long, short = rounded(1, 2, 3)
    for run, times in ((long, 3.0), (short, 2.0)):
        for step in (0, 1):
            run.tensors[f"{step}/gradients/zero"] *= times
    # The norm of the first run's second step is twice the limit.
    long.numbers |= {"start/max_norm": 2.0, "1/grad_norm": 4.0}
    assert Limits.of(torch.float32, reference, [long, short]).noise == {"zero": pytest.approx(6e-3, rel=1e-4)}
    reference.numbers |= {"start/max_norm": 2.0, "0/grad_norm": 16.0}
    assert Limits.of(torch.float32, reference, [long, short]).noise == {"zero": pytest.approx(8e-3, rel=1e-4)}


def test_a_gradient_with_a_direction_is_no_rounding() -> None:
    reference, *sound = rounded(1, 1, 1)
    assert Limits.of(torch.float32, reference, sound).noise == {}
    assert Limits.of(torch.float32, reference).noise == {}


@pytest.mark.parametrize(("cosine", "noise"), [(0.8, set()), (0.6, {"zero"})])
def test_a_gradient_is_only_rounding_if_its_mean_angle_is_large(cosine: float, noise: set[str]) -> None:
    reference, *sound = rounded(1, 1, 1)
    for run, direction in ((reference, [1.0, 0.0]), *((run, [cosine, math.sqrt(1 - cosine**2)]) for run in sound)):
        for step in (0, 1):
            run.tensors[f"{step}/gradients/zero"] = torch.tensor(direction)
    assert Limits.of(torch.float32, reference, sound).noise.keys() == noise


def test_a_gradient_of_less_than_a_bit_of_the_norm_of_all_is_zero() -> None:
    bit = torch.finfo(torch.float32).eps
    (one,) = rounded(1, times=5e2 * bit)
    (other,) = rounded(2, times=9e2 * bit)
    for run in (one, other):
        run.numbers |= {"0/grad_norm": 1.0, "1/grad_norm": 1.0}
    assert [d for d in deviations(one, other) if d.name == "zero" and d.size] == []
    other.numbers["1/grad_norm"] = 0.5
    assert {(d.kind, d.step) for d in deviations(one, other) if d.name == "zero" and d.size} == {
        ("angle", 1), ("length", 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mine", "theirs", "norms", "compared"),
    [
        (1e-7, 0.0, (4.0, 1.0), True),  # 4e-7 before clipping, which is above eps times the reference's norm of 1
        (1e-7, 0.0, (1.0, 1.0), False),
        (0.0, 2e-7, (1.0, 4.0), True),  # 8e-7 before clipping, above 4.8e-7
        (0.0, 1e-7, (1.0, 4.0), False),
    ],
)
def test_gradients_shorter_than_rounding_before_clipping_are_not_compared(
    mine: float, theirs: float, norms: tuple[float, float], compared: bool
) -> None:
    common = model(start__model__a=[1.0], at_0__model__a=[1.0])
    one, other = (
        measured(tensors=common | model(at_0__gradients__a=[value]), start__max_norm=1.0, at_0__grad_norm=norm)
        for value, norm in zip((mine, theirs), norms, strict=True)
    )
    assert (("angle", "a", 0) in {(d.kind, d.name, d.step) for d in deviations(one, other)}) is compared
