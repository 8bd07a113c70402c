"""``export: best`` exports the weights of the best checkpoint, and leaves the last weights in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.job_file.job import Best
from d9d_engine.job import Job
from d9d_testing.toy.runs import assert_identical, final_tensors, noted, quiet
from safetensors.torch import load_file
from torch import Tensor

MakeJob = Callable[..., Job]
#: The loss of the toy model falls, so with `max` the first evaluation is the best one.
FIRST: dict[str, Any] = {"every": 2, "keep": 1, "best": {"mode": "max"}}
EVALUATION = {"every": 2, "data": "toy_data"}


def exported(run: Job, kind: str = "model") -> dict[str, Tensor]:
    (file,) = (run.run.directory / kind).glob("*.safetensors")
    return load_file(file)


@pytest.fixture
def best(job: MakeJob) -> MakeJob:
    return partial(job, "export=best", evaluation=EVALUATION, checkpoint=FIRST)


def test_the_best_checkpoint_is_exported_and_the_last_weights_stay_in_memory(job: MakeJob, best: MakeJob) -> None:
    short, run = job("run.name=short", "steps=2"), best("run.name=run")
    quiet(short).train()
    trainer, notes = noted(run)
    trainer.train()
    assert_identical(exported(run), exported(short))
    last = {name.removeprefix("model/"): t for name, t in final_tensors(run).items() if name.startswith("model/")}
    assert all(torch.equal(tensor, last[name]) for name, tensor in trainer.stage.state_dict().items())
    (note,) = (note for note in notes if note.startswith("export:"))
    assert note.startswith("export: step 2 of 12, with the best eval/loss (")
    card = (run.run.directory / "model" / "README.md").read_text()
    assert "| Steps | 2 |\n" in card
    assert f"| Exported checkpoint | {note.removeprefix('export: ')} |" in card
    trainer.export(run.run.directory / "now")
    now = exported(run, "now")
    assert any(not torch.equal(now[name], tensor) for name, tensor in exported(run).items())


def test_the_lowest_evaluation_loss_is_the_default_and_the_last_step_may_have_it(job: MakeJob) -> None:
    sections = {"evaluation": EVALUATION, "checkpoint": {"every": 4}}
    plain, whole = job("run.name=plain", "steps=8"), job("export=best", "run.name=whole", **sections)
    ended = job("export=best", "steps=8", "run.name=ended", **sections)
    assert whole.checkpoint.best == Best()
    for run in (plain, whole, ended):
        quiet(run).train()
    for run, steps in ((whole, 12), (ended, 8)):
        assert_identical(exported(run), exported(plain))
        card = (run.run.directory / "model" / "README.md").read_text()
        assert f"| Exported checkpoint | step 8 of {steps}, with the best eval/loss (0.12" in card


def test_a_checkpoint_between_two_evaluations_is_not_the_best(best: MakeJob) -> None:
    run = best(evaluation={**EVALUATION, "every": 4}, checkpoint={**FIRST, "every": 1})
    trainer, notes = noted(run)
    trainer.train()
    assert any(note.startswith("export: step 4 of 12") for note in notes)


def test_after_early_stopping_a_kill_or_a_finished_run_the_export_is_the_same(best: MakeJob) -> None:
    stopping = {"name": "early_stopping", "patience": 2, "mode": "max"}
    run, parts = best("run.name=run", subscribers=[stopping]), best("run.name=parts", subscribers=[stopping])
    trainer, notes = noted(run)
    assert trainer.train().step == 6
    assert any(note.startswith("export: step 2 of 6") for note in notes)
    with quiet(parts) as stopped:
        list(stopped.steps(3))
    quiet(parts).train()
    assert_identical(exported(run), exported(parts))
    before = (run.run.directory / "model" / "README.md").read_bytes()
    quiet(run).train()
    assert (run.run.directory / "model" / "README.md").read_bytes() == before


def test_without_a_finite_value_the_last_step_is_exported_with_a_warning(
    best: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, notes = noted(best())
    assert trainer.evaluator is not None
    monkeypatch.setattr(trainer.evaluator, "run", lambda _: {"eval/loss": float("nan")})
    trainer.train()
    assert any("export: no checkpoint has a value of 'eval/loss'; the weights of the last step" in n for n in notes)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"checkpoint": {"every": 2}}, "compares 'eval/loss', but the job has no evaluation; add a section evaluation"),
        ({"evaluation": EVALUATION}, "saves only its last step; set checkpoint.every: 2"),
        (
            {"evaluation": EVALUATION, "checkpoint": {"every": 3}},
            "checkpoint.every 3 and evaluation.every 2 are not multiples; set checkpoint.every: 2",
        ),
        (
            {"evaluation": {"every": 2, "sets": {"a": "toy_data"}}, "checkpoint": {"every": 2}},
            r"checkpoint.best.series: 'eval/loss' is never logged; did you mean 'eval/a/loss'\?",
        ),
    ],
)
def test_a_job_that_cannot_have_a_best_checkpoint_is_refused(
    job: MakeJob, sections: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=text):
        quiet(job("export=best", **{"checkpoint": {"every": None}, **sections}))
