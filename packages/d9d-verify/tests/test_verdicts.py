"""Verdicts on layouts, the table of them, and states that a layout saves."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_engine.job import Job
from d9d_verify import run
from d9d_verify.command import _print
from d9d_verify.compare import Verdict, compare, compared
from d9d_verify.deviations import FLOORS, Limits
from d9d_verify.layouts import Layout
from d9d_verify.measurement import Measurement
from d9d_verify.run import unlike_saved, unlike_state


def two_steps(**changes: float) -> Measurement:
    """Two steps of a run with a parameter, a buffer and a state."""
    numbers = {f"{step}/{name}": 2.0 for step in range(2) for name in ("loss", "tokens", "grad_norm", "lr")}
    numbers |= {"end/accuracy": 0.5, "end/load[0]": 1.0, "end/load[1]": 1.0}
    tensors = {"start/model/a": torch.ones(2), "start/model/b": torch.ones(1)}
    for step in range(2):
        tensors |= {f"{step}/gradients/{name}": torch.ones(2) for name in ("a",)}
        tensors |= {f"{step}/model/a": torch.full((2,), 0.5 - 0.25 * step), f"{step}/model/b": torch.ones(1)}
        tensors |= {f"{step}/optimizer/a/momentum": torch.ones(2)}
    for name, factor in changes.items():
        key = name.removeprefix("at_").replace("__", "/")
        if key in numbers:
            numbers[key] *= factor
        else:
            tensors[key] = tensors[key] * factor
    return Measurement(numbers, tensors)


def judged(measured: Measurement) -> Verdict:
    return compare("x", measured, two_steps(), Limits.of(torch.float32, two_steps()))


def test_a_verdict_has_the_largest_deviation_of_each_kind_with_its_name() -> None:
    verdict = judged(
        two_steps(at_0__loss=1.25, at_1__loss=1.5, at_1__grad_norm=1.125, at_1__gradients__a=2.0, at_1__model__a=2.0)
    )
    assert (verdict.layout, verdict.loss, verdict.grad_norm) == ("x", 0.5, 0.125)
    assert verdict.norm == (0.5, "a")
    assert verdict.update == (pytest.approx(1.0), "a")
    assert verdict.angle == (pytest.approx(0.0, abs=1e-12), "a")
    assert verdict.diverged is not None
    assert verdict.diverged[0] == 0


def test_what_is_not_a_number_is_the_largest_deviation() -> None:
    verdict = judged(two_steps(at_0__loss=math.nan, at_1__loss=1.5))
    assert verdict.loss == math.inf
    values = verdict.to_json()
    assert (values["loss"], values["passed"], values["layout"]) == ("inf", False, "x")
    assert values["diverged"] == [0, "the loss is off by inf (allowed 5e-06)"]
    json.dumps(values, allow_nan=False)


def test_a_layout_that_failed_diverges_from_the_first_step() -> None:
    verdict = Verdict.failure("x", "no port")
    assert (verdict.passed, verdict.diverged) == (False, (0, "no port"))
    assert verdict.to_json()["angle"] == ["nan", "nothing"]
    assert judged(two_steps()).to_json()["passed"] is True


def test_the_first_step_that_deviates_is_named() -> None:
    assert judged(two_steps(at_1__loss=1.5)).diverged == (1, "the loss is off by 5.0e-01 (allowed 5e-06)")
    assert judged(two_steps(at_1__lr=2.0)).diverged == (1, "the learning rate is off by 1.0e+00")
    # Values at the end belong to the last step.
    assert judged(two_steps(end__accuracy=2.0)).diverged == (
        1, "the series accuracy is off by 1.0e+00 (allowed 1e-04)",
    )  # fmt: skip


def test_the_deviating_gradient_of_the_same_step_is_named_with_the_norm() -> None:
    text = "the gradient norm is off by 1.2e-01 (allowed 1e-05)"
    both = judged(two_steps(at_0__grad_norm=1.125, at_0__gradients__a=2.0, at_1__gradients__a=4.0))
    assert both.diverged == (0, f"{text}; the gradient of a most, by 5.0e-01")
    later = judged(two_steps(at_0__grad_norm=1.125, at_1__gradients__a=4.0))
    assert later.diverged == (0, text)


def test_ranks_that_disagree_before_a_deviation_are_named_instead() -> None:
    off = two_steps(at_1__model__a=2.0)
    said = "ranks that should have equal values have different values of"
    for name, step, what in (
        ("0/optimizer/a/momentum", 0, "the optimizer's a/momentum"),
        ("1/gradients/a", 1, "the gradient of a"),
        ("start/model/a", 0, "a"),
    ):
        found = judged(Measurement(off.numbers, off.tensors, [name]))
        assert found.diverged == (step, f"{said} {what}")
    found = judged(Measurement(two_steps().numbers, two_steps().tensors, ["end/accuracy"]))
    assert found.diverged == (1, f"{said} the series accuracy")
    found = judged(Measurement(off.numbers, off.tensors, ["1/optimizer/a/momentum"]))
    assert found.diverged is not None
    assert found.diverged[1].startswith("the update of a ")


def test_buffers_come_before_states_and_states_before_anything_else_of_a_step() -> None:
    for changed, later, what in (
        ({"at_0__model__b": 2.0}, "0/optimizer/a/momentum", "the buffer b is off"),
        ({"at_0__optimizer__a__momentum": 2.0}, "0/other", "the optimizer's a/momentum after a step"),
    ):
        off = two_steps(**changed)
        found = judged(Measurement(off.numbers, off.tensors, [later]))
        assert found.diverged is not None
        assert found.diverged[1].startswith(what)


def test_other_names_are_listed_up_to_three() -> None:
    more = two_steps()
    more.numbers |= {f"end/{letter}": 1.0 for letter in "dcba"}
    assert judged(more).diverged == (
        0, "different parameters, states or series: missing [], extra ['end/a', 'end/b', 'end/c']",
    )  # fmt: skip


def test_the_list_of_compared_values_counts_them() -> None:
    numbers = "loss and its terms, number of tokens, gradient norm, learning rate"
    gradients = "1 gradients before the optimizer's step, and its updates from equal gradients"
    equal = "and bitwise equality of values that several ranks have"
    assert compared(two_steps()) == (
        f"2 steps: {numbers}, {gradients}, 1 tensors of the optimizer's state, 1 buffers and frozen parameters, "
        f"the series accuracy, load, {equal}"
    )
    bare = Measurement({"0/loss": 1.0}, {"0/gradients/a": torch.ones(1), "0/model/a": torch.ones(1)})
    assert compared(bare) == (
        f"1 steps: {numbers}, {gradients}, no optimizer state, no metrics, no evaluation, {equal}"
    )


def test_the_table_has_a_line_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Verdict("pp=2", 0.5, 0.25, (1e-9, "a"), (0.125, "b"), (2.0, "c"), (1, "the loss is off"))
    _print([judged(two_steps()), wrong])
    titles, good, bad = (
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in capsys.readouterr().out.splitlines()
    )
    assert titles == [
        "layout", "loss", "gradient norm", "worst angle (1-cos)", "worst length", "worst update", "verdict",
    ]  # fmt: skip
    assert good == ["x", "0.0e+00", "0.0e+00", "0.0e+00 a", "0.0e+00 a", "0.0e+00 a", "pass"]
    assert bad == ["pp=2", "5.0e-01", "2.5e-01", "1.0e-09 a", "1.2e-01 b", "2.0e+00 c", "FAIL step 2: the loss is off"]


def saved(**changes: Any) -> Any:
    """Stand-in of a checkpoint: values, and tensors of a metric."""
    values = {"data": {"pack": 2}, "skipped": 0, "skips": {"total": 0}, "tokens": 5, **changes.get("values", {})}
    tensors = {"metrics/loss/sum": torch.tensor([3.0, 4.0]), "model/a": torch.ones(1), **changes.get("tensors", {})}

    def load_into(wanted: dict[str, torch.Tensor], _scope: str) -> None:
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])

    table = {name: {"shape": list(tensor.shape), "dtype": "float32"} for name, tensor in tensors.items()}
    return SimpleNamespace(step=2, values=lambda: values, manifest={"tensors": table}, load_into=load_into)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"values": {"data": {"pack": 3}}}, "the checkpoint of step 2 has data: {'pack': 3}, expected {'pack': 2}"),
        ({"values": {"skipped": 1}}, "the checkpoint of step 2 has skipped: 1, expected 0"),
        (
            {"values": {"skips": {"total": 1}}},
            "the checkpoint of step 2 has skips: {'total': 1}, expected {'total': 0}",
        ),
        ({"values": {"tokens": 7}}, None),  # verify counts no tokens of its own
        ({"tensors": {"metrics/loss/sum": torch.tensor([3.0, 4.0004])}}, None),
        (
            {"tensors": {"metrics/loss/sum": torch.tensor([3.0, 5.0])}},
            "metrics/loss/sum in the checkpoint of step 2 is off by 2.0e-01 (allowed 1e-04)",
        ),
        (
            {"tensors": {"metrics/new/sum": torch.ones(1)}},
            "the checkpoint of step 2 has the metrics ['metrics/loss/sum', 'metrics/new/sum'], expected "
            "['metrics/loss/sum']",
        ),
    ],
)
def test_a_saved_position_counter_or_metric_that_differs_is_named(changes: Any, said: str | None) -> None:
    limits = Limits(FLOORS[torch.float32], {})
    assert unlike_state(saved(**changes), saved(), limits) == said


def test_a_metric_that_is_off_by_its_limit_is_fine() -> None:
    changed = saved(tensors={"metrics/loss/sum": torch.tensor([3.0, 5.25])})
    for floor, fine in ((0.25, True), (0.2499, False)):
        assert (unlike_state(changed, saved(), Limits({"series": floor}, {})) is None) is fine


def test_a_layout_that_saves_nothing_is_wrong() -> None:
    assert unlike_state(None, saved(), Limits(FLOORS[torch.float32], {})) == "no checkpoint was saved"
    assert unlike_state(saved(), None, Limits(FLOORS[torch.float32], {})) == "no checkpoint was saved"
    assert unlike_saved(None, two_steps(), two_steps()) == "no checkpoint was saved"


@pytest.mark.parametrize(
    ("name", "of_layout", "said"),
    [
        ("model/a", 2.0, None),  # a parameter has the layout's value
        ("model/a", 1.0, "model/a in the checkpoint of step 2 differs from the trained value"),
        ("model/b", 1.0, None),  # a buffer was replaced by the reference's
        ("model/b", 2.0, "model/b in the checkpoint of step 2 differs from the trained value"),
        ("optimizer/a/momentum", 2.0, None),
        (
            "optimizer/a/momentum",
            1.0,
            "optimizer/a/momentum in the checkpoint of step 2 differs from the trained value",
        ),
    ],
)
def test_saved_weights_and_states_are_those_of_the_layouts_step(name: str, of_layout: float, said: str | None) -> None:
    def run_of(value: float) -> Measurement:
        names = ("0/model/a", "0/model/b", "1/model/a", "1/model/b", "1/optimizer/a/momentum", "1/gradients/a")
        return Measurement({}, {of: torch.full((2,), value if of.startswith("1/") else 7.0) for of in names})

    def load_into(wanted: dict[str, torch.Tensor], scope: str) -> None:
        assert all(of.startswith(scope) for of in wanted)
        for tensor in wanted.values():
            tensor.fill_(of_layout)

    manifest = {"tensors": {of: {"shape": [2], "dtype": "float32"} for of in (name, "metrics/x")}}
    checkpoint: Any = SimpleNamespace(step=2, manifest=manifest, load_into=load_into)
    assert unlike_saved(checkpoint, run_of(2.0), run_of(1.0)) == said


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_layout_that_passes_and_saves_another_state_fails_at_the_step_of_the_save(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """A single step saves nothing."""
    monkeypatch.setattr(run, "scaled_values", lambda *_: {"batch": {"size": 4}, "precision": {}, "parallel": []})
    monkeypatch.setattr(run, "ops_of", lambda *_: ["rope"])
    monkeypatch.setattr(run, "scaled_model", lambda *_: torch.nn.Identity())
    monkeypatch.setattr(run, "_check", lambda *_: None)
    monkeypatch.setattr(run, "_reference", lambda *_, **_named: (two_steps(), []))
    monkeypatch.setattr(run, "_run", lambda *_: two_steps())
    monkeypatch.setattr(run, "_settings", lambda *_: "settings")
    monkeypatch.setattr(run, "_checkpoint", lambda directory: (directory.parent.name, directory.name))
    own, reference = ("0", "checkpoints"), ("reference", "checkpoints")
    monkeypatch.setattr(run, "unlike_saved", lambda mine, *_: None if mine == own else "not the layout's")
    monkeypatch.setattr(
        run, "unlike_state", lambda *given: "another position" if given[:2] == (own, reference) else None
    )
    (verdict,) = run.verify(cast("Job", None), [Layout("x", {"dp_shard": 2}, [])], steps, lambda _text: None)
    assert verdict.diverged == (None if steps == 1 else (steps // 2 - 1, "another position"))
