"""Comparison of measurements, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_verify.compare import Verdict, compare
from d9d_verify.deviations import Limits
from d9d_verify.measurement import Measurement, Record
from hypothesis import given
from hypothesis import strategies as st


def step(**changes: Any) -> Measurement:
    """One step of a run with two parameters and a buffer."""
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(64, generator=generator), "b": torch.randn(16, 4, generator=generator)}
    gradients = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
    tensors = {f"start/model/{name}": tensor for name, tensor in start.items()} | {"start/model/bias": torch.zeros(4)}
    tensors |= {f"0/gradients/{name}": gradient for name, gradient in gradients.items()}
    tensors |= {f"0/model/{name}": start[name] - 0.05 * gradient for name, gradient in gradients.items()}
    tensors |= {"0/model/bias": torch.ones(4), "0/optimizer/a/momentum": gradients["a"].clone()}
    numbers = {
        "0/loss": 2.0,
        "0/tokens": 24.0,
        "0/grad_norm": 1.5,
        "0/lr": 0.05,
        "end/accuracy": 0.5,
        "end/eval/loss": 2.5,
    }
    for name, change in changes.items():
        target = numbers if name in numbers else tensors
        target[name] = change(target[name])  # type: ignore[index]
    return Measurement(numbers, tensors)


def judged(measured: Measurement, dtype: torch.dtype = torch.float32, sound: Sequence[Measurement] = ()) -> Verdict:
    return compare("x", measured, step(), Limits.of(dtype, step(), sound))


def test_what_is_equal_passes() -> None:
    verdict = judged(step())
    assert verdict.passed
    assert (verdict.loss, verdict.angle[0], verdict.norm[0], verdict.update[0]) == (0.0, 0.0, 0.0, 0.0)


@given(st.sampled_from([0.5, 0.999, 1.001, 2.0, -1.0, 0.0, float("nan")]))
def test_a_gradient_of_another_length_or_direction_fails_and_is_named(scale: float) -> None:
    verdict = judged(step(**{"0/gradients/b": lambda gradient: gradient * scale}))
    assert verdict.norm[1] == "b" or verdict.angle[1] == "b"
    assert verdict.diverged is not None
    assert verdict.diverged[0] == 0
    assert "gradient of b" in verdict.diverged[1]
    json.dumps(verdict.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("0/loss", lambda x: x * 1.0001, "the loss is off"),
        ("0/loss", lambda _: float("nan"), "the loss is off"),
        ("0/tokens", lambda x: x + 1, "the number of tokens is off by 4.2e-02"),
        ("0/grad_norm", lambda x: x * 1.001, "the gradient norm is off"),
        ("0/lr", lambda x: x * 1.000001, "the learning rate is off"),
        ("start/model/a", lambda x: x + 1e-7, "the initial values of a differ"),
        ("0/model/a", lambda x: x * 0.999995, "after an update from equal gradients"),
        ("0/model/b", lambda x: x + 0.001, "the update of b from equal gradients is off"),
        ("0/model/bias", lambda x: x * 0, "the buffer bias is off"),
        ("0/optimizer/a/momentum", lambda x: x * 0, "the optimizer's a/momentum"),
        ("end/accuracy", lambda x: x * 1.001, "the series accuracy is off"),
        ("end/eval/loss", lambda x: x * 1.0001, "eval/loss is off"),
    ],
)  # fmt: skip
def test_every_other_difference_fails_and_says_what_it_is(name: str, change: Callable[..., Any], said: str) -> None:
    verdict = judged(step(**{name: change}))
    assert verdict.diverged is not None
    assert said in verdict.diverged[1]


def test_a_difference_of_names_or_shapes_fails() -> None:
    other, short = step(), step()
    del other.tensors["0/gradients/a"]
    short.tensors["0/gradients/a"] = torch.zeros(3)
    assert [judged(one).diverged for one in (other, short)] == [
        (0, "different parameters, states or series: missing ['0/gradients/a'], extra []"),
        (0, "the shape of the gradient of a differs"),
    ]


def test_limits_follow_what_sound_runs_of_the_same_job_show() -> None:
    off = step(**{"0/loss": lambda x: x * 1.0001})
    assert not judged(off).passed
    assert judged(off, sound=[step(**{"0/loss": lambda x: x * 1.00005})]).passed
    assert not judged(step(**{"0/loss": lambda x: x * 1.01}), torch.bfloat16).passed


def test_ranks_that_hold_the_same_differently_are_found() -> None:
    def record(value: float) -> Record:
        found = Record({"0/loss": 1.0})
        found.take("0/model", {"a": torch.full((3,), value)})
        return found

    assert Measurement.of([record(1.0), record(1.0)]).disagreements == []
    measured = Measurement.of([record(1.0), record(1.0 + 2**-23)])
    assert measured.disagreements == ["0/model/a"]
    verdict = judged(Measurement(step().numbers, step().tensors, ["0/model/a"]))
    assert verdict.diverged == (0, "ranks that should have equal values have different values of a")


def test_the_length_of_a_gradient_shows_behind_clipping() -> None:
    def clipped(norm: float) -> Measurement:
        found = step(**{"0/grad_norm": lambda _: norm})
        found.numbers["start/max_norm"] = 1.0
        return found

    verdict = compare("x", clipped(4.0), clipped(2.0), Limits.of(torch.float32, clipped(2.0)))
    assert verdict.norm[0] == pytest.approx(0.5)


def test_a_record_survives_its_files(tmp_path: Path) -> None:
    first = Record({"0/loss": float("inf"), "0/lr": float("nan")})
    first.take("0/model", {"a": torch.randn(3, 2).t(), "b": torch.ones((), dtype=torch.bool)})
    first.write(tmp_path, 0)
    again = Record.read(tmp_path, 0)
    assert repr(again.numbers) == repr(first.numbers)
    assert again.windows.keys() == first.windows.keys() == {"0/model/a@0,0", "0/model/b@"}
    assert all(torch.equal(again.windows[name], tensor) for name, tensor in first.windows.items())
