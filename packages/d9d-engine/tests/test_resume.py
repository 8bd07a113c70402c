from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.errors import CheckpointError, JobError, SaveError
from d9d_engine.checkpoint import save as dcp_save
from d9d_engine.job import Job
from d9d_engine.run.directory import read_ending
from d9d_testing.logs import read_log_without_times
from d9d_testing.toy.config import ToyModelConfig
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, noted, quiet, toy_registry
from d9d_weights.hugging_face.shard import ShardWriter
from safetensors.torch import load_file

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.smoke


def run_until(trained: Job, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train and die without any farewell in the middle of step ``step``."""

    class Killed(Exception):
        pass

    trainer = quiet(trained)
    run = trainer.step.executor.run

    def die(number: int, pack: Any, scale: Any, share: Any) -> Any:
        if trainer.step.optimizer._steps == step:  # type: ignore[attr-defined]
            raise Killed
        trainer.step.optimizer._steps += 1  # type: ignore[attr-defined]
        return run(number, pack, scale, share)

    trainer.step.optimizer._steps = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(trainer.step.executor, "run", die)
    with pytest.raises(Killed):
        trainer.train()


@pytest.mark.thorough
@pytest.mark.parametrize("died_at", [3, 4, 9, 11])
def test_a_resumed_run_ends_with_identical_weights_moments_metrics_and_log(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, died_at: int
) -> None:
    straight, broken = job("run.name=straight"), job("run.name=broken")
    quiet(straight).train()
    run_until(broken, died_at, monkeypatch)
    trainer, notes = noted(broken)
    trainer.train()
    assert any("resumed at step" in note for note in notes) == (died_at >= 4)
    assert_identical(final_tensors(straight), final_tensors(broken))
    assert read_log_without_times(straight.run.directory) == read_log_without_times(broken.run.directory)


def test_a_finished_run_has_nothing_left_to_do(job: MakeJob) -> None:
    quiet(job()).train()
    trainer, notes = noted(job())
    assert trainer.train().step == 12
    assert "nothing left to train: the checkpoint is at step 12, the job has 12 steps" in notes


@pytest.mark.parametrize("change", ["task.decay=0.5", "steps=6"])
def test_a_start_that_trains_nothing_leaves_the_record_of_the_run(job: MakeJob, change: str) -> None:
    trained = job("steps=8", "checkpoint.every=null")
    quiet(trained).train()
    describing = ("job.yaml", "plugins.json", "facts.json", "finished.json", "model/README.md")
    before = {name: (trained.run.directory / name).read_bytes() for name in describing}
    assert quiet(job("steps=8", change)).train().status == "finished"
    assert {name: (trained.run.directory / name).read_bytes() for name in describing} == before
    shutil.rmtree(trained.run.directory / "model")
    quiet(job("steps=8", "task.decay=0.5")).train()
    assert "decay: 0.01" in (trained.run.directory / "model" / "README.md").read_text()


def test_an_interrupted_export_of_a_shorter_job_counts_the_steps_of_the_weights(job: MakeJob) -> None:
    trained = job("steps=8", "export=false")
    quiet(trained).train()
    (trained.run.directory / "finished.json").unlink()
    quiet(job("steps=4", "export=false")).train()
    assert read_ending(trained.run.directory) == {"step": 8, "steps": 8, "reason": None}


def test_what_a_killed_process_had_yet_to_remove_is_removed_by_the_next(job: MakeJob) -> None:
    quiet(job("checkpoint.keep=2")).train()
    directory = job().run.directory / "checkpoints"
    assert len(list(directory.glob("step-*"))) == 2
    assert quiet(job("checkpoint.keep=1")).train().step == 12
    assert [file.name for file in directory.glob("step-*")] == ["step-00000012"]


def test_a_run_can_be_prolonged(job: MakeJob) -> None:
    straight, prolonged = job("run.name=straight", "steps=20"), job("run.name=prolonged")
    quiet(straight).train()
    quiet(prolonged).train()
    quiet(job("run.name=prolonged", "steps=20")).train()
    assert_identical(final_tensors(straight), final_tensors(prolonged))
    logs = [
        [(line["step"], line["loss"], line["absolute_error"]) for line in metrics_of(run) if line["step"] % 5 == 0]
        for run in (straight, prolonged)
    ]
    assert logs[0] == logs[1]


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(job: MakeJob) -> None:
    straight, broken = job("run.name=straight"), job("run.name=broken")
    quiet(straight).train()
    quiet(broken).train()
    newest = broken.run.directory / "checkpoints" / "step-00000012" / "tensors-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    trainer, notes = noted(broken)
    trainer.train()
    assert any(
        "the checksum of tensors-00000.safetensors is wrong, so the file is damaged; trying the one before" in n
        for n in notes
    )
    assert "resumed at step 8 of 12" in notes
    assert_identical(final_tensors(straight), final_tensors(broken))


def test_never_and_must_are_taken_at_their_word(job: MakeJob) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint, but checkpoint.resume is 'must'"):
        quiet(job("checkpoint.resume=must")).train()
    quiet(job()).train()
    with pytest.raises(CheckpointError, match="holds checkpoints, but checkpoint.resume is 'never'"):
        quiet(job("checkpoint.resume=never")).train()


def test_a_checkpoint_of_another_model_is_refused(job: MakeJob) -> None:
    quiet(job()).train()
    before = (job().run.directory / "job.yaml").read_text()
    with pytest.raises(CheckpointError, match=r"is of another model: model.blocks: 2 there, 3 here; restore the job"):
        quiet(job(model={"name": "toy_model", "blocks": 3})).train()
    assert (job().run.directory / "job.yaml").read_text() == before


def test_a_signal_finishes_the_step_saves_and_stops(job: MakeJob) -> None:
    straight, stopped = job("run.name=straight"), job("run.name=stopped")
    quiet(straight).train()
    trainer, notes = noted(stopped)
    forward = trainer.step.executor.run

    def interrupt(step: int, pack: Any, scale: Any, share: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return forward(step, pack, scale, share)

    trainer.step.executor.run = interrupt  # type: ignore[method-assign]
    outcome = trainer.train()
    assert (outcome.status, outcome.step) == ("stopped", 1)
    assert "SIGTERM: stopped after step 1 of 12 and saved; start again to continue" in notes
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not (stopped.run.directory / "model").exists()
    quiet(stopped).train()
    assert_identical(final_tensors(straight), final_tensors(stopped))


def test_an_infinite_p_survives_checkpoint_and_resume(job: MakeJob) -> None:
    quiet(job("gradient_clipping.p=.inf")).train()
    trainer, notes = noted(job("gradient_clipping.p=.inf", "steps=14"))
    assert trainer.train().step == 14
    assert [note for note in notes if note.startswith("changed")] == ["changed since step-00000012: steps: 12 -> 14"]


def test_dropout_is_drawn_anew_each_step_and_the_same_after_a_resume(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, broken = job("run.name=a", "model.dropout=0.5"), job("run.name=b", "model.dropout=0.5")
    quiet(straight).train()
    torch.manual_seed(99)
    run_until(broken, 6, monkeypatch)
    torch.manual_seed(7)
    quiet(broken).train()
    assert_identical(final_tensors(straight), final_tensors(broken))
    trainer = quiet(job("run.name=c", "model.dropout=0.5", "optimizer.lr=0.0"))
    pack = trainer.prefetcher.next()
    assert trainer.step(0, pack).loss != trainer.step(1, pack).loss


def test_the_count_of_skipped_steps_survives_a_resume(job: MakeJob) -> None:
    data = {"name": "toy_data", "nan_at": 2}
    quiet(job("nonfinite=skip", data=data)).train()
    quiet(job("nonfinite=skip", "steps=20", data=data)).train()
    assert metrics_of(job())[-1]["skipped_steps"] == 1


def test_trackers_continue_the_run_they_had_even_if_one_failed_in_between(job: MakeJob, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def train(steps: int, fails_in: str) -> None:
        tracker = {"name": "toy_tracker", "path": str(calls), "fails_in": fails_in}
        quiet(job(f"steps={steps}", trackers=[tracker])).train()

    train(4, "nothing")
    train(8, "open")
    train(12, "nothing")
    opened = [line for line in calls.read_text().splitlines() if line.startswith("open")]
    assert opened == [
        f"open toy at {n} with {state}" for n, state in ((0, None), (4, {"id": "toy-1"}), (8, {"id": "toy-1"}))
    ]


@pytest.mark.parametrize(
    ("override", "text"),
    [("seed=5", "is of another run: seed: 0 there, 5 here"), ("precision.parameters=bfloat16", "precision.parameters")],
)
def test_what_a_resumed_run_may_not_change_is_refused(job: MakeJob, override: str, text: str) -> None:
    quiet(job()).train()
    with pytest.raises(CheckpointError, match=text):
        quiet(job(override)).train()


def test_what_a_resumed_run_does_change_is_said(job: MakeJob) -> None:
    quiet(job()).train()
    trainer, notes = noted(job("steps=14", "optimizer.lr=0.01", "batch.size=4"))
    trainer.train()
    assert [note.partition(": ")[2] for note in notes if note.startswith("changed since step-00000012")] == [
        "batch.size: 8 -> 4", "optimizer.lr: 0.05 -> 0.01", "steps: 12 -> 14",
    ]  # fmt: skip


class FreeModelConfig(ToyModelConfig):
    """Lets its dropout go, but never down."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset({"dropout"})

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        if self.dropout < saved["dropout"]:
            raise ValueError(f"dropout: the checkpoint has {saved['dropout']}; keep it")


def free(job: MakeJob, *overrides: str, **fields: Any) -> Job:
    """A job of the toy with a model of its own."""
    made = job(*overrides)
    return made.model_copy(update={"model": FreeModelConfig(**fields)}).use(toy_registry())


def test_a_model_says_which_of_its_fields_may_change(job: MakeJob) -> None:
    quiet(free(job, "steps=1", dropout=0.1)).train()
    trainer, notes = noted(free(job, "steps=2", dropout=0.2))
    assert trainer.train().step == 2
    assert [note for note in notes if note.startswith("changed")] == [
        "changed since step-00000001: model.dropout: 0.1 -> 0.2",
        "changed since step-00000001: steps: 1 -> 2",
    ]
    with pytest.raises(CheckpointError, match=r"step-00000002 is of another model: model.dropout: .* has 0.2; keep it"):
        quiet(free(job, "steps=3", dropout=0.1)).train()
    with pytest.raises(CheckpointError, match="is of another model: model.blocks: 2 there, 3 here; restore the job"):
        quiet(free(job, "steps=3", dropout=0.3, blocks=3)).train()


def test_a_model_that_says_nothing_lets_nothing_go(job: MakeJob) -> None:
    quiet(job("steps=1")).train()
    with pytest.raises(CheckpointError, match=r"is of another model: model.dropout: 0.0 there, 0.5 here"):
        quiet(job("model.dropout=0.5")).train()


def test_metrics_can_come_and_go_between_resumes(job: MakeJob) -> None:
    quiet(job("steps=3")).train()
    quiet(job("steps=6", metrics=[])).train()
    trainer, notes = noted(job("steps=9"))
    trainer.train()
    assert "warning: metric 'toy_metric' has no fitting state in step-00000006 and starts anew" in notes


def test_after_a_damaged_checkpoint_new_ones_are_kept(job: MakeJob) -> None:
    broken = job("checkpoint.keep=1", "checkpoint.every=1", "steps=8")
    quiet(broken).train()
    checkpoints = broken.run.directory / "checkpoints"
    (checkpoints / "step-00000012").mkdir()
    (checkpoints / "step-00000012" / "manifest.json").write_text("{")
    trainer, notes = noted(job("checkpoint.keep=1", "checkpoint.every=1", "steps=10"))
    trainer.train()
    assert any("a damaged checkpoint was set aside as" in note for note in notes)
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000010", "step-00000012.damaged"]


def test_two_runs_in_one_directory_are_refused(job: MakeJob) -> None:
    first, second = quiet(job()), quiet(job())
    with (
        first.checkpointer.store.opened(),
        pytest.raises(CheckpointError, match=r"in use by another training run.*process \d+"),
    ):
        second.train()
    assert second.train().status == "finished"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_without_frozen_parameters_is_resumed_from(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    options = ("checkpoint.trainable_only=true", f"checkpoint.asynchronous={str(asynchronous).lower()}", "export=false")
    straight, broken = (job(f"run.name={name}", *options, peft="toy_peft") for name in ("straight", "broken"))
    quiet(straight).train()
    assert {name for name in final_tensors(straight) if name.startswith("model/")} == {
        "model/layers.0.weight", "model/scale",
    }  # fmt: skip
    run_until(broken, 9, monkeypatch)
    trainer, notes = noted(broken)
    weights = {name: parameter.clone() for name, parameter in trainer.stage.named_parameters()}
    trainer.train()
    assert "resumed at step 8 of 12" in notes
    assert_identical(final_tensors(straight), final_tensors(broken))
    changed = {name for name, parameter in trainer.stage.named_parameters() if not parameter.equal(weights[name])}
    assert changed == {"layers.0.weight"}


def test_only_what_was_left_out_on_purpose_may_be_absent(job: MakeJob) -> None:
    quiet(job("checkpoint.trainable_only=true", "export=false", peft="toy_peft")).train()
    with pytest.raises(CheckpointError, match="'model/layers.1.weight' is not in the checkpoint"):
        quiet(job("export=false", peft="toy_peft")).train()
    with pytest.raises(CheckpointError, match="'model/layers.1.weight' is not in the checkpoint"):
        quiet(job("checkpoint.trainable_only=true", "export=false")).train()


def test_the_best_checkpoint_by_a_logged_series_stays(job: MakeJob) -> None:
    best = {"series": "loss", "mode": "max"}
    run = job("logging.every=1", "steps=20", checkpoint={"every": 2, "keep": 1, "keep_every": 8, "best": best})
    quiet(run).train()
    losses = {line["step"]: line["loss"] for line in metrics_of(run) if "loss" in line and line["step"] % 2 == 0}
    expected = {8, 16, 20, max(losses, key=lambda step: losses[step])}
    assert {int(path.name[5:]) for path in (run.run.directory / "checkpoints").glob("step-*")} == expected


def test_a_series_that_nobody_logs_is_reported(job: MakeJob) -> None:
    with pytest.raises(JobError, match="'eval/loss' is never logged; the job has no evaluation section"):
        quiet(job(checkpoint={"best": {}}))
    trainer, notes = noted(job(checkpoint={"every": 4, "best": {"series": "los"}}))
    trainer.train()
    reports = [note for note in notes if "checkpoint.best" in note]
    assert len(reports) == 1
    assert "'los' was not logged yet" in reports[0]
    assert "grad_norm, loss" in reports[0]


def test_checkpoints_lie_where_the_job_says(job: MakeJob, tmp_path: Path) -> None:
    straight = job("run.name=straight")
    quiet(straight).train()
    elsewhere = f"checkpoint.dir={tmp_path}/elsewhere"
    quiet(job("run.name=a", elsewhere, "steps=8")).train()
    assert not (job("run.name=a").run.directory / "checkpoints").exists()
    remote = [f"checkpoint.dir=file://{tmp_path}/store", "run.name=b"]
    quiet(job(*remote, "steps=8")).train()
    for options in ([elsewhere, "run.name=a"], remote):
        trainer, notes = noted(job(*options))
        trainer.train()
        assert "resumed at step 8 of 12" in notes
    for directory in ("elsewhere", "store"):
        found = load_file(tmp_path / directory / "step-00000012" / "tensors-00000.safetensors")
        assert_identical(final_tensors(straight), found)


def test_a_save_that_fails_in_the_background_ends_the_run(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    write = dcp_save.write_tensors

    def write_to_a_disk_that_gets_full(file: Any, *arguments: Any) -> Any:
        # Saves overlap with steps, so the path decides which save fails, and not the time.
        if "step-00000008" in str(file.name):
            raise OSError(28, "No space left on device")
        return write(file, *arguments)

    trainer = quiet(job("steps=100", "export=false", "checkpoint.tolerate_failures=0"))
    monkeypatch.setattr(dcp_save, "write_tensors", write_to_a_disk_that_gets_full)
    with pytest.raises(CheckpointError, match="step-00000008 could not be written: .*No space left on device"):
        trainer.train()
    assert trainer.checkpointer.store.steps() == [4]


def test_an_export_on_a_full_disk_is_made_by_the_next_start(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    trained = job()
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", full)
        text = "model could not be written: .*No space left on device; the last checkpoint is complete; start the job"
        with pytest.raises(SaveError, match=text) as caught:
            quiet(trained).train()
    assert caught.value.exit_code == 1
    assert not any("model" in path.name for path in trained.run.directory.iterdir())
    assert quiet(trained).train().status == "finished"
    assert (trained.run.directory / "model" / "model.safetensors").exists()


def test_a_failed_save_makes_all_ranks_stop_after_the_same_step(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet(job("checkpoint.every=null", "export=false"))
    monkeypatch.setattr(type(trainer.checkpointer.store), "failed", True)
    assert trainer.step(0, trainer.prefetcher.next()).stop
