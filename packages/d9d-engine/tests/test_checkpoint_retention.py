from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from d9d_core.job_file.job import Checkpoint
from d9d_engine.checkpoint.retention import BestOf, Retention
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_testing.hostile.files import sign
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

STEPS = st.sets(st.integers(1, 40), min_size=1, max_size=12)
BEST = st.builds(BestOf, st.just("x"), st.sampled_from(["min", "max"]), st.integers(1, 3))


@given(
    STEPS, st.data(), st.none() | st.integers(1, 4), st.none() | st.integers(1, 7), st.none() | BEST,
    st.sets(st.integers(1, 45), max_size=2),
)  # fmt: skip
def test_exactly_what_some_rule_keeps_stays(
    steps: set[int], data: st.DataObject, newest: int | None, every: int | None, best: BestOf | None, before: set[int]
) -> None:
    scores = data.draw(st.dictionaries(st.sampled_from(sorted(steps)), st.floats(-9, 9)))
    saved = max(steps)
    gone = Retention(newest, every, best).surplus(steps, scores, saved, before)
    stay = steps - set(gone)
    for step in steps:
        newer = sum(other > step for other in steps)
        better = 0
        if best is not None and step in scores:
            sign = 1 if best.mode == "min" else -1
            better = sum((sign * scores[o], o) < (sign * scores[step], step) for o in scores)
        wanted = (
            newest is None
            or newer < newest
            or (every is not None and step % every == 0)
            or (best is not None and step in scores and better < best.keep)
            or any(step < bound and not any(step < other < bound for other in steps) for bound in before)
        )
        assert (step in stay) == wanted


def test_what_was_saved_just_now_stays_even_if_others_have_higher_numbers() -> None:
    assert Retention(1).surplus([5, 8, 9], {}, saved=5) == [8, 9]
    assert Retention(2).surplus([5, 8, 9], {}, saved=5) == [8]


@pytest.mark.thorough
def test_the_best_stays_across_stores_and_a_value_that_is_no_number_never_wins(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: None, 6: float("-inf")}
    for step, loss in losses.items():
        store = CheckpointStore(tmp_path, Retention(1, best=BestOf("eval/loss", "min", 1)))
        store.save(step, {"a": torch.zeros(2)}, {}, {}, score=loss)
    assert store.steps() == [6, 2]
    assert json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())["score"] == {
        "series": "eval/loss", "value": 1.0,
    }  # fmt: skip


def test_a_value_of_another_series_does_not_count(tmp_path: Path) -> None:
    for step, series in enumerate(("a", "b", "b"), start=1):
        store = CheckpointStore(tmp_path, Retention(1, best=BestOf(series, "min", 1)))
        store.save(step, {"a": torch.zeros(2)}, {}, {}, score=float(step))
    assert store.steps() == [3, 2]


@pytest.mark.parametrize(("mode", "best"), [("min", (2, 1.0)), ("max", (3, 3.0))])
def test_the_best_is_the_oldest_of_the_best_of_its_series(
    tmp_path: Path, mode: Literal["min", "max"], best: tuple[int, float]
) -> None:
    assert CheckpointStore(tmp_path, Retention(None, best=BestOf("a", mode, 1))).best() is None
    for step, score in enumerate((9.0 if mode == "max" else -9.0, 1.0, 3.0, 3.0, 1.0, None), start=1):
        store = CheckpointStore(tmp_path, Retention(None, best=BestOf("b" if step == 1 else "a", mode, 1)))
        store.save(step, {"a": torch.zeros(2)}, {}, {}, score=score)
    assert store.best() == best
    assert CheckpointStore(tmp_path).best() is None


def test_a_checkpoint_whose_score_is_null_is_not_the_best(tmp_path: Path) -> None:
    for step in (1, 2):
        store = CheckpointStore(tmp_path, Retention(1, best=BestOf("a", "min", 1)))
        store.save(step, {"a": torch.zeros(2)}, {}, {}, score=float(step))
        manifest = tmp_path / f"step-{step:08}" / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"score": None}))
        sign(manifest.parent)
    store = CheckpointStore(tmp_path, Retention(1, best=BestOf("a", "min", 1)))
    store.save(3, {"a": torch.zeros(2)}, {}, {}, score=3.0)
    store.save(4, {"a": torch.zeros(2)}, {}, {}, score=4.0)
    assert store.steps() == [4, 3]


def test_multiples_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, Retention(1, every=4))
    for step in range(2, 13, 2):
        store.save(step, {"a": torch.zeros(2)}, {}, {})
    assert store.steps() == [12, 8, 4]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"keep": None, "keep_every": 4, "every": 2}, "keeps all checkpoints, so keep_every has no effect"),
        ({"keep_every": 4}, "keep_every 4 must be a multiple of every, which is None"),
        ({"keep_every": 4, "every": 3}, "keep_every 4 must be a multiple of every, which is 3"),
    ],
)
def test_rules_without_effect_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Checkpoint.model_validate(values)
