from __future__ import annotations

import math
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_optim.schedule import curves
from d9d_optim.schedule.builder import piecewise_schedule
from d9d_optim.schedule.config import (
    ConstantConfig,
    CosineConfig,
    CurveName,
    InverseSqrtConfig,
    LinearConfig,
    Phase,
    PiecewiseConfig,
    WarmupStableDecayConfig,
)
from d9d_optim.schedule.curves import curve_of
from d9d_optim.schedule.schedules import constant, cosine, inverse_sqrt, linear, piecewise, warmup_stable_decay
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

CURVES = ["linear", "cosine", "poly", "poly_late", "exponential", "inverse_sqrt"]


def chain(total: int, *phases: dict[str, Any], start: float = 0.0) -> list[float]:
    schedule = piecewise(PiecewiseConfig.model_validate({"start": start, "phases": list(phases)}), total)
    return [schedule(step) for step in range(total)]


def test_constant_is_one_everywhere() -> None:
    schedule = constant(ConstantConfig(), 10)
    assert [schedule(step) for step in (0, 5, 9, 100)] == [1.0] * 4


def test_cosine_warms_up_without_a_zero_step_and_ends_at_the_minimum() -> None:
    schedule = cosine(CosineConfig(warmup_steps=4, min_factor=0.1), 14)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(8) == pytest.approx(0.55)
    assert schedule(13) == 0.1
    assert schedule(1000) == 0.1


def test_cosine_without_warm_up_follows_the_formula() -> None:
    schedule = cosine(CosineConfig(min_factor=0.0), 10)
    for step in range(10):
        assert schedule(step) == pytest.approx((1 + math.cos(math.pi * (step + 1) / 10)) / 2)


@pytest.mark.parametrize(("fraction", "total", "steps"), [(0.1, 40, 4), (0.1, 10, 1), (0.1, 4, 0), (0.0, 10, 0)])
def test_a_warm_up_may_be_a_fraction_of_the_run(fraction: float, total: int, steps: int) -> None:
    for build, config in (
        (cosine, CosineConfig), (linear, LinearConfig), (warmup_stable_decay, WarmupStableDecayConfig),
    ):  # fmt: skip
        schedule, same = build(config(warmup_fraction=fraction), total), build(config(warmup_steps=steps), total)
        assert [schedule(step) for step in range(total)] == [same(step) for step in range(total)]


def test_a_warm_up_has_one_length() -> None:
    with pytest.raises(ValidationError, match="warmup_steps and warmup_fraction are both set; set only one"):
        CosineConfig(warmup_steps=3, warmup_fraction=0.1)


def test_warm_up_longer_than_the_run_is_an_error() -> None:
    with pytest.raises(JobError, match=r"the warm-up takes 10 steps, but the run has 10; use at most 9"):
        cosine(CosineConfig(warmup_steps=10), 10)


def test_phases_by_steps_by_fraction_and_the_rest() -> None:
    values = chain(10, {"steps": 2, "to": 1.0}, {"until": 0.6, "to": 1.0}, {"to": 0.2})
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert values[-1] == 0.2


@pytest.mark.parametrize("curve", CURVES)
def test_every_curve_hits_both_ends_exactly(curve: Any) -> None:
    follow = curve_of(Phase(to=0.7, curve=curve), 0.3, 10, "phase")
    assert follow(0.3, 0.7, 0.0) == 0.3
    assert follow(0.3, 0.7, 1.0) == 0.7


def test_curves_have_their_known_middles() -> None:
    assert curves.linear(1.0, 0.0, 0.25) == 0.75
    assert curves.cosine(1.0, 0.0, 1 / 3) == pytest.approx(0.75)
    assert curves.poly(1.0, 0.0, 0.5, power=3) == 0.125
    assert curves.poly_late(1.0, 0.0, 0.5, power=3) == 0.875
    assert curves.exponential(1.0, 0.01, 0.5) == pytest.approx(0.1)
    assert curves.exponential(1.0, 0.0, 0.5, floor=0.01) == pytest.approx(0.1)
    # Steps 100 to 400 of 1 / sqrt(step), at step 225.
    assert curves.inverse_sqrt(0.1, 0.05, 125 / 300) == pytest.approx(1 / 15)


def test_exponential_with_a_floor_still_ends_at_zero() -> None:
    values = chain(10, {"to": 0.0, "curve": "exponential", "floor": 0.01}, start=1.0)
    assert values[-1] == 0.0
    assert values[-2] == pytest.approx(0.01**0.9)


def test_a_curve_of_ones_own_is_followed_up_to_its_exact_end() -> None:
    values = chain(4, {"to": 0.5, "curve": f"{__name__}:steep"}, start=1.0)
    assert values == [steep(1.0, 0.5, part) for part in (0.25, 0.5, 0.75)] + [0.5]


def steep(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) * (1 - progress) ** 5


def still() -> float:
    return 1.0


def below(begin: float, end: float, progress: float) -> float:
    return begin - 2 * progress


@pytest.mark.parametrize(
    ("curve", "text"),
    [
        ("below", r"lr_schedule.phases\[0\].curve: .*below\(1, 0.5, 0.75\) returns -0.5"),
        ("stepe", r"has no 'stepe'; did you mean .*\.steep"),
        ("CURVES", r"is a list; name a function of \(begin, end, progress\)"),
        ("still", r"still\(1, 0.5, 0.25\) raises .*it is called with \(begin, end, progress\)"),
    ],
)
def test_a_curve_that_is_none_is_an_error(curve: str, text: str) -> None:
    with pytest.raises(JobError, match=text):
        chain(4, {"to": 0.5, "curve": f"{__name__}:{curve}"}, start=1.0)


def test_linear_goes_straight_to_its_minimum() -> None:
    schedule = linear(LinearConfig(warmup_steps=2, min_factor=0.2), 6)
    assert [schedule(step) for step in range(6)] == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_warmup_stable_decay_decays_in_its_last_steps() -> None:
    schedule = warmup_stable_decay(WarmupStableDecayConfig(warmup_steps=2, decay_fraction=0.4), 10)
    assert [schedule(step) for step in range(10)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    same = warmup_stable_decay(WarmupStableDecayConfig(warmup_steps=2, decay_steps=4), 10)
    assert [same(step) for step in range(10)] == [schedule(step) for step in range(10)]


def test_inverse_sqrt_is_half_after_four_times_the_warm_up() -> None:
    schedule = inverse_sqrt(InverseSqrtConfig(warmup_steps=4), 100)
    assert [schedule(step) for step in (0, 3, 15, 63)] == [0.25, 1.0, 0.5, 0.25]


def test_presets_longer_than_the_run_are_errors() -> None:
    with pytest.raises(JobError, match=r"the warm-up takes 8 steps and the decay 3, but the run has 10"):
        warmup_stable_decay(WarmupStableDecayConfig(warmup_steps=8, decay_steps=3), 10)
    with pytest.raises(JobError, match=r"warmup_steps is 11, but the run has 10 steps; use at most 10"):
        inverse_sqrt(InverseSqrtConfig(warmup_steps=11), 10)
    with pytest.raises(ValidationError, match="set only one"):
        WarmupStableDecayConfig(decay_steps=3, decay_fraction=0.5)


def test_the_builder_writes_the_section_of_a_job() -> None:
    builder = piecewise_schedule().for_steps(2, 1.0).until_fraction(0.6, 1.0).fill_rest(0.2, "poly", power=3)
    written = PiecewiseConfig.model_validate(
        {"phases": [{"steps": 2, "to": 1.0}, {"until": 0.6, "to": 1.0}, {"to": 0.2, "curve": "poly", "power": 3}]}
    )
    assert builder.config() == written
    assert [builder.build(10)(step) for step in range(10)] == [piecewise(written, 10)(step) for step in range(10)]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: piecewise_schedule().for_steps(2, -1.0), "phase 0: to: .*greater than or equal to 0"),
        (lambda: piecewise_schedule().fill_rest(1.0).for_steps(2, 1.0), "phase 1: the previous phase covers the rest"),
        (lambda: piecewise_schedule().for_steps(2, 1.0, "cosin"), "phase 0: curve: .*did you mean 'cosine'"),
        (lambda: piecewise_schedule().config(), "needs at least one phase"),
        (lambda: piecewise_schedule().fill_rest(1.0).build(), r"length of the run is unknown; call build\(total_steps"),
        (lambda: piecewise_schedule(0.0, 10).for_steps(11, 1.0).build(), r"phases\[0\] ends at step 11"),
    ],
)
def test_the_builder_refuses_what_a_job_file_may_not_say(build: Any, text: str) -> None:
    with pytest.raises(JobError, match=text):
        build()


def test_the_power_of_a_phase_is_that_of_its_curve() -> None:
    assert chain(2, {"to": 0.0, "curve": "poly", "power": 3}, start=1.0) == [0.125, 0.0]


@pytest.mark.parametrize(
    ("total", "phases", "text"),
    [
        (10, [{"steps": 11, "to": 1}], r"phases\[0\] ends at step 11, but the run has 10"),
        (10, [{"steps": 6, "to": 1}, {"steps": 6, "to": 0}], r"phases\[1\] ends at step 12"),
        (10, [{"steps": 6, "to": 1}], r"end at step 6, but the run has 10 steps.*cover the rest"),
        (10, [{"steps": 6, "to": 1}, {"until": 0.5, "to": 0}], r"phases\[1\] gets no step.*begins at step 6.*step 5"),
        (10, [{"steps": 10, "to": 1}, {"to": 0}], r"phases\[1\] gets no step"),
    ],
)
def test_phases_that_do_not_fill_the_run_are_errors(total: int, phases: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(JobError, match=text):
        chain(total, *phases)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"phases": []}, "at least one phase"),
        ({"phases": [{"to": 1}, {"steps": 3, "to": 0}]}, "phase 0 has no length"),
        ({"phases": [{"to": 1, "steps": 3, "until": 0.5}]}, "one of them"),
        ({"phases": [{"to": 1, "curve": "exponential"}]}, "can neither begin nor end at zero"),
        ({"phases": [{"to": 1, "curve": "inverse_sqrt"}]}, "can neither begin nor end at zero"),
        ({"phases": [{"to": 1, "power": 2}]}, "power belongs to curve 'poly'"),
        ({"phases": [{"to": 1, "floor": 0.1}]}, "floor belongs to curve 'exponential'"),
        ({"phases": [{"to": -1}]}, "greater than or equal to 0"),
        ({"phases": [{"to": float("nan")}]}, "finite|1000000"),
        ({"phases": [{"to": 1, "curve": "cosin"}]}, "did you mean 'cosine'"),
    ],
)
def test_impossible_phases_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        PiecewiseConfig.model_validate(config)


@st.composite
def phase_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    values = st.floats(1e-6, 100)
    return [{"steps": n, "to": draw(values), "curve": draw(st.sampled_from(CURVES))} for n in lengths]


@given(phase_lists(), st.floats(1e-6, 100))
def test_factors_stay_between_phase_ends_without_jumps(phases: list[dict[str, Any]], start: float) -> None:
    total = sum(phase["steps"] for phase in phases)
    values = chain(total, *phases, start=start)
    first, begin = 0, start
    for phase in phases:
        end = first + phase["steps"]
        low, high = sorted((begin, phase["to"]))
        inside = values[first:end]
        assert all(math.isfinite(v) and low * (1 - 1e-9) <= v <= high * (1 + 1e-9) for v in inside)
        assert inside[-1] == phase["to"]
        # Monotone from one end to the other, and both ends are met: that is what continuity means on a grid of steps.
        rising = [begin, *inside]
        assert rising == pytest.approx(sorted(rising, reverse=phase["to"] < begin), rel=1e-9)
        first, begin = end, phase["to"]


@given(st.integers(1, 300), st.data())
def test_cosine_factors_are_positive_and_at_most_one(total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total - 1))
    schedule = cosine(CosineConfig(warmup_steps=warmup, min_factor=0.05), total)
    values = [schedule(step) for step in range(total)]
    assert all(0 < value <= 1 for value in values)
    assert max(values[:warmup], default=1.0) == 1.0
    assert values[-1] == 0.05


@pytest.mark.parametrize("curve", ["module:curve", "package.module", "package.module:curve", "cosine"])
def test_a_curve_is_a_built_in_name_or_an_import_path(curve: str) -> None:
    assert TypeAdapter(CurveName).validate_python(curve) == curve
    with pytest.raises(ValidationError, match="did you mean 'cosine'"):
        TypeAdapter(CurveName).validate_python("cosin")


def test_warmup_stable_decay_decays_in_a_tenth_of_the_run_and_may_fill_it_whole() -> None:
    schedule = warmup_stable_decay(WarmupStableDecayConfig(), 20)
    assert [schedule(step) for step in (0, 17, 18, 19)] == [1.0, 1.0, 0.5, 0.0]
    assert warmup_stable_decay(WarmupStableDecayConfig(min_factor=0.25), 3)(2) == 0.25  # one step at least
    whole = warmup_stable_decay(WarmupStableDecayConfig(warmup_steps=2, decay_steps=2, curve="poly_late"), 4)
    assert [whole(step) for step in range(5)] == [0.5, 1.0, 0.75, 0.0, 0.0]


def test_presets_warm_up_as_long_as_the_run_lasts() -> None:
    assert inverse_sqrt(InverseSqrtConfig(warmup_steps=10), 10)(9) == 1.0
    schedule = linear(LinearConfig(warmup_steps=9), 10)
    assert [schedule(step) for step in (0, 8, 9)] == [pytest.approx(1 / 9), 1.0, 0.0]
    assert [linear(LinearConfig(), 4)(step) for step in range(4)] == [0.75, 0.5, 0.25, 0.0]
    assert cosine(CosineConfig(), 4)(3) == 0.1


def test_a_phase_ends_at_the_nearest_step_to_its_fraction() -> None:
    assert chain(7, {"until": 0.5, "to": 1.0}, {"to": 0.0}) == pytest.approx([0.25, 0.5, 0.75, 1.0, 2 / 3, 1 / 3, 0.0])
    assert chain(2, {"steps": 1, "to": 1.0}, {"until": 1.0, "to": 3.0}) == [1.0, 3.0]
    with pytest.raises(JobError) as error:
        chain(10, {"until": 0.04, "to": 1.0}, {"to": 0.0})
    assert str(error.value) == (
        "lr_schedule.phases[0] gets no step: it begins at step 0 and ends at step 0 of 10; shorten the phases before "
        "it, remove it, or train longer"
    )


def half(_begin: float, _end: float, _progress: float) -> float:
    return 0.5


def zero(_begin: float, _end: float, _progress: float) -> float:
    return 0.0


def endless(_begin: float, _end: float, progress: float) -> float:
    return math.inf if progress > 0.5 else 0.5


def text(_begin: float, _end: float, _progress: float) -> str:
    return "0.5"


def test_a_users_curve_may_return_zero_but_nothing_that_is_no_factor() -> None:
    assert chain(2, {"to": 1.0, "curve": f"{__name__}:zero"}) == [0.0, 1.0]
    for curve, said in (("endless", "0.75) returns inf;"), ("text", "0.25) returns '0.5';")):
        with pytest.raises(JobError) as error:
            chain(4, {"to": 1.0, "curve": f"{__name__}:{curve}"})
        assert said in str(error.value)


def test_a_users_curve_is_tried_at_ten_thousand_points_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    assert curves._TRIALS == 10_000
    monkeypatch.setattr(curves, "_TRIALS", 4)
    curves._try(lambda _b, _e, progress: tried.append(progress) or 0.0, Phase(to=1.0), 0.0, 3, "here")
    assert tried == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    tried.clear()
    curves._try(lambda _b, _e, progress: tried.append(progress) or 0.0, Phase(to=1.0), 0.0, 5, "here")
    assert tried == [0.25, 0.5, 0.75, 1.0]


def test_powers_are_two_and_floors_zero_unless_given() -> None:
    assert curve_of(Phase(to=0.0, curve="poly"), 1.0, 4, "phase")(1.0, 0.0, 0.5) == 0.25
    assert curve_of(Phase(to=0.0, curve="poly_late"), 1.0, 4, "phase")(1.0, 0.0, 0.25) == 1 - 0.0625
    assert curve_of(Phase(to=4.0, curve="exponential"), 1.0, 4, "phase")(1.0, 4.0, 0.5) == 2.0
    assert curve_of(Phase(to=0.0, curve="exponential", floor=0.25), 1.0, 4, "phase")(1.0, 0.0, 0.5) == 0.5
    # The start is below the floor, too.
    assert curves.exponential(0.0, 1.0, 0.5, floor=0.25) == 0.5
    assert [curves.exponential(0.0, 1.0, end, floor=0.25) for end in (0.0, 1.0)] == [0.0, 1.0]
    assert [curves.inverse_sqrt(2.0, 1.0, end) for end in (0.0, 1.0)] == [2.0, 1.0]


def test_a_builder_starts_where_it_is_told_and_knows_its_length() -> None:
    builder = piecewise_schedule(0.5, 4).for_steps(2, 1.0).fill_rest(0.0)
    assert [builder.build()(step) for step in range(4)] == [0.75, 1.0, 0.5, 0.0]
    assert builder.build(3)(2) == 0.0
    assert builder.config().start == 0.5
    with pytest.raises(JobError) as error:
        piecewise_schedule().for_steps(0, -1.0)
    assert str(error.value) == (
        "piecewise_schedule, phase 0: steps: Input should be greater than or equal to 1; to: Input should be greater "
        "than or equal to 0"
    )
    piecewise_schedule().for_steps(1, 1.0).until_fraction(0.5, 1.0).for_steps(1, 0.5)  # each has a length
