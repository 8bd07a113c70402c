"""Steps that are skipped because they are not finite: how many in a row, and the checkpoints from before them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.errors import NonFiniteError
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.job import Job
from d9d_engine.run.logbook import Skips, is_state
from d9d_testing.toy.data import ToyStream
from d9d_testing.toy.runs import quiet

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.smoke


@pytest.fixture
def nan_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], None]:
    """Make the samples of these steps (1-based) NaN."""
    whole = ToyStream.next_pack

    def make(steps: range) -> None:
        def next_pack(self: ToyStream) -> Any:
            pack = whole(self)
            if self.state()["packs"] in steps:
                for microbatch in pack:
                    microbatch["y"].fill_(torch.nan)
            return pack

        monkeypatch.setattr(ToyStream, "next_pack", next_pack)

    return make


def steps_of(job: Job) -> list[int]:
    return sorted(CheckpointStore(job.run.directory / "checkpoints", None).steps())


@pytest.mark.thorough
def test_too_many_skipped_steps_in_a_row_end_the_run(job: MakeJob, nan_in: Callable[[range], None]) -> None:
    nan_in(range(4, 13))
    skipping = job("nonfinite=skip", "max_skipped=5", "checkpoint.every=1", "checkpoint.keep=1", "steps=12")
    with pytest.raises(NonFiniteError, match=r"step 8: loss is nan.* 5 steps in a row since step 4"):
        quiet(skipping).train()
    assert steps_of(skipping) == [3, 7]
    assert not (skipping.run.directory / "finished.json").exists()
    assert not (skipping.run.directory / "model").exists()


def test_a_finite_step_begins_the_count_anew(job: MakeJob, nan_in: Callable[[range], None]) -> None:
    nan_in(range(2, 12, 2))
    assert quiet(job("nonfinite=skip", "max_skipped=2", "steps=12")).train().status == "finished"


def test_the_last_checkpoint_before_the_first_skip_and_before_those_in_a_row_stay(
    job: MakeJob, nan_in: Callable[[range], None]
) -> None:
    nan_in(range(3, 13, 3))  # 3, 6, 9, 12
    skipping = job("nonfinite=skip", "checkpoint.every=1", "checkpoint.keep=1", "steps=12")
    quiet(skipping).train()
    assert steps_of(skipping) == [2, 11, 12]


def test_a_checkpoint_saved_while_steps_are_skipped_is_not_the_best(
    job: MakeJob, nan_in: Callable[[range], None]
) -> None:
    nan_in(range(5, 9))
    skipping = job(
        "nonfinite=skip", "steps=8", "logging.every=1",
        checkpoint={"every": 1, "keep": 1, "best": {"series": "loss", "keep": 8}},
    )  # fmt: skip
    quiet(skipping).train()
    assert {5, 6, 7}.isdisjoint(steps_of(skipping))


def test_the_count_goes_on_when_a_run_is_resumed(job: MakeJob, nan_in: Callable[[range], None]) -> None:
    nan_in(range(4, 13))
    skipping = job("nonfinite=skip", "checkpoint.every=1", "checkpoint.keep=1", "steps=6")
    quiet(skipping).train()
    assert steps_of(skipping) == [3, 6]
    longer = job("nonfinite=skip", "max_skipped=5", "checkpoint.every=1", "checkpoint.keep=1", "steps=12")
    with pytest.raises(NonFiniteError, match="5 steps in a row since step 4"):
        quiet(longer).train()
    assert steps_of(longer) == [3, 7]


def test_a_run_whose_last_steps_were_skipped_says_so(job: MakeJob, nan_in: Callable[[range], None]) -> None:
    nan_in(range(10, 13))
    notes: list[str] = []
    job("nonfinite=skip", "steps=12").build(notes.append).train()
    assert any(note.startswith("warning: the last 3 of 12 steps were skipped") for note in notes)


@pytest.mark.parametrize("values", [None, {}, {"total": -1}, {**Skips().state(), "first": True}, {"x": 1}])
def test_other_values_are_no_state_of_skips(values: object) -> None:
    assert not is_state(values)
    assert is_state(json.loads(json.dumps(Skips(3, 1, 2, 7).state())))
