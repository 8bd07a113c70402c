from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError, DataError, JobError, NonFiniteError
from d9d_core.job import Job
from d9d_core.loop import events as ev
from d9d_core.loop.trainer import Trainer
from d9d_core.plugin import Registry
from d9d_core.state.checkpoint import CheckpointStore
from safetensors.torch import load_file

pytestmark = pytest.mark.smoke

REGISTRY = Registry.of(toy)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """A job over the toy plugin; keyword arguments replace sections."""

    def make(*overrides: str, **sections: Any) -> Job:
        values: dict[str, Any] = {
            "run": {"name": "toy", "dir": str(tmp_path / "runs")},
            "steps": 12,
            "device": "cpu",
            "batch": {"size": 8, "microbatch": 4},
            "model": "toy_model",
            "data": "toy_data",
            "task": {"name": "toy_task", "decay": 0.01},
            "optimizer": "toy_optimizer",
            "metrics": ["toy_metric"],
            "logging": {"every": 5},
            "checkpoint": {"every": 4},
            **sections,
        }
        path = tmp_path / "job.json"
        path.write_text(json.dumps(values))
        return Job.load(path, registry=REGISTRY, overrides=overrides)

    return make


def notes_of(job: Job) -> tuple[Trainer, list[str]]:
    notes: list[str] = []
    return job.build(notes.append), notes


def metrics_of(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.run.directory / "metrics.jsonl").read_text().splitlines()]


def final_tensors(job: Job) -> dict[str, torch.Tensor]:
    newest = CheckpointStore(job.run.directory / "checkpoints", None).paths()[0]
    return load_file(newest / "tensors-00000.safetensors")


def assert_identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


# --- the loop


def test_a_run_leaves_everything_that_is_promised(job: Callable[..., Job]) -> None:
    trained = job()
    outcome = trained.build(lambda _: None).train()
    assert (outcome.status, outcome.step) == ("finished", 12)
    directory = trained.run.directory
    assert {path.name for path in directory.iterdir()} == {
        "job.yaml", "plugins.json", "metrics.jsonl", "loss.svg", "checkpoints", "model",
    }  # fmt: skip
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    assert {path.name for path in (directory / "model").iterdir()} == {
        "config.json", "features.txt", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
    }  # fmt: skip
    assert (directory / "loss.svg").read_text().count("<path") > 3
    lines = metrics_of(trained)
    assert [line["step"] for line in lines] == [1, 5, 10, 12]
    assert {"loss", "loss/error", "loss/decay", "grad_norm", "lr", "tokens", "tokens_per_second", "absolute_error"} <= (
        lines[0].keys()
    )
    assert lines[-1]["tokens"] == 12 * 8
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[1]["loss"] == pytest.approx(lines[1]["loss/error"] + 0.01 * lines[1]["loss/decay"])


def test_the_job_file_that_a_run_leaves_runs_again_to_the_same_weights(job: Callable[..., Job]) -> None:
    first = job()
    first.build(lambda _: None).train()
    again = Job.load(first.run.directory / "job.yaml", registry=first.registry, overrides=["run.name=again"])
    again.build(lambda _: None).train()
    assert_identical(final_tensors(first), final_tensors(again))


@pytest.mark.parametrize("microbatch", [1, 2, 8])
def test_gradient_accumulation_changes_nothing(job: Callable[..., Job], microbatch: int) -> None:
    whole, parts = job("batch.microbatch=4", "run.name=a"), job(f"batch.microbatch={microbatch}", "run.name=b")
    whole.build(lambda _: None).train()
    parts.build(lambda _: None).train()
    for name, tensor in final_tensors(whole).items():
        torch.testing.assert_close(final_tensors(parts)[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_a_step_equals_plain_pytorch(job: Callable[..., Job]) -> None:
    trainer = job("gradient_clipping.max_norm=0.5").build(lambda _: None)
    stage = trainer.step.executor._stage
    plain = {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()}
    pack = trainer.feed.next()
    x, y = torch.cat([m["x"] for m in pack]), torch.cat([m["y"] for m in pack])
    hidden = x
    for index in range(2):
        hidden = hidden + torch.tanh(hidden @ plain[f"layers.{index}.weight"])
    loss = (hidden - y).square().mean() + 0.01 * hidden.square().mean()
    loss.backward()
    used = [p for p in plain.values() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(used, 0.5)
    result = trainer.step(0, pack)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for name, parameter in stage.named_parameters():
        moved = plain[name] - (0 if plain[name].grad is None else 0.05 * plain[name].grad)
        torch.testing.assert_close(parameter.detach(), moved.detach(), msg=name)


def test_a_pack_in_which_nothing_counts_gives_zero_and_no_nan(job: Callable[..., Job]) -> None:
    masked = job(data={"name": "toy_data", "masked_at": 4})
    masked.build(lambda _: None).train()
    line = metrics_of(masked)[1]
    assert line["step"] == 5
    assert line["loss/error"] == 0
    assert all(value is not None for values in metrics_of(masked) for value in values.values())


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_clipping_scales_and_null_only_measures(job: Callable[..., Job], max_norm: float | None) -> None:
    trainer = job(gradient_clipping={"max_norm": max_norm}).build(lambda _: None)
    before = [p.detach().clone() for p in trainer.step.executor._stage.parameters()]
    result = trainer.step(0, trainer.feed.next())
    after = list(trainer.step.executor._stage.parameters())
    moved = torch.stack([(a - b).norm() for a, b in zip(after, before, strict=True)]).norm() / 0.05
    expected = result.grad_norm.item() if max_norm is None else max_norm
    assert moved.item() == pytest.approx(expected, rel=1e-3)


# --- events


def test_events_arrive_in_the_documented_order(job: Callable[..., Job], tmp_path: Path) -> None:
    recorder = {"name": "toy_recorder", "path": str(tmp_path / "events")}
    evaluation = {"every": 2, "data": "toy_data"}
    job("steps=2", "checkpoint.every=1", subscribers=[recorder], evaluation=evaluation).build(lambda _: None).train()
    names = (tmp_path / "events").read_text().split()
    step = [
        "StepStarts", "ForwardBackwardStarts", "ForwardBackwardEnds",
        "OptimizerStepStarts", "OptimizerStepEnds", "StepEnds",
    ]  # fmt: skip
    assert names == [
        "JobConfigured", "DataReady", "ModelReady", "OptimizerReady", "TrainingStarts",
        *step, "ValuesLogged", "CheckpointStarts", "CheckpointSaved",
        *step, "ValuesLogged", "EvaluationStarts", "ValuesLogged", "EvaluationEnds",
        "CheckpointStarts", "CheckpointSaved",
        "TrainingFinished",
    ]  # fmt: skip


def test_a_subscriber_to_something_that_is_no_event_is_refused() -> None:
    class Wrong:
        def subscriptions(self) -> Any:
            return [(int, print)]

    with pytest.raises(TypeError, match="Wrong subscribes to <class 'int'>; events are: JobConfigured"):
        ev.Events([Wrong()])


# --- non-finite steps


def test_a_nonfinite_step_ends_the_run_and_is_never_saved(job: Callable[..., Job], tmp_path: Path) -> None:
    recorder = {"name": "toy_recorder", "path": str(tmp_path / "events")}
    failing = job(data={"name": "toy_data", "nan_at": 6}, subscribers=[recorder])
    with pytest.raises(NonFiniteError, match=r"step 7: loss is nan and grad_norm is nan; this step changed nothing"):
        failing.build(lambda _: None).train()
    assert [p.name for p in CheckpointStore(failing.run.directory / "checkpoints", None).paths()] == ["step-00000004"]
    assert (tmp_path / "events").read_text().split()[-1] == "TrainingFailed"


def test_a_skipped_step_leaves_weights_and_moments_as_they_were(job: Callable[..., Job]) -> None:
    skipping = job("nonfinite=skip", data={"name": "toy_data", "nan_at": 6})
    trainer = skipping.build(lambda _: None)
    for step in range(6):
        trainer.step(step, trainer.feed.next())
    before = {name: tensor.clone() for name, tensor in trainer.keeper._tensors().items() if "metrics" not in name}
    result = trainer.step(6, trainer.feed.next())
    assert not result.finite
    after = trainer.keeper._tensors()
    assert_identical(before, {name: after[name] for name in before})


def test_skipped_steps_are_counted_and_logged_as_null(job: Callable[..., Job]) -> None:
    skipping = job("nonfinite=skip", data={"name": "toy_data", "nan_at": 4}, metrics=[])
    skipping.build(lambda _: None).train()
    lines = metrics_of(skipping)
    assert (lines[1]["step"], lines[1]["loss"], lines[1]["skipped_steps"]) == (5, None, 1.0)
    assert lines[-1]["loss"] is not None


# --- resume


def run_until(trained: Job, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train and die without any farewell in the middle of step ``step``."""

    class Killed(BaseException):
        pass

    trainer = trained.build(lambda _: None)
    run = trainer.step.executor.run

    def die(pack: Any, scale: Any) -> Any:
        if trainer.step.optimizer._steps == step:  # type: ignore[attr-defined]
            raise Killed
        trainer.step.optimizer._steps += 1  # type: ignore[attr-defined]
        return run(pack, scale)

    trainer.step.optimizer._steps = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(trainer.step.executor, "run", die)
    with pytest.raises(Killed):
        trainer.train()


@pytest.mark.parametrize("died_at", [3, 4, 9, 11])
def test_a_resumed_run_ends_with_identical_weights_moments_metrics_and_log(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, died_at: int
) -> None:
    straight, broken = job("run.name=straight"), job("run.name=broken")
    straight.build(lambda _: None).train()
    run_until(broken, died_at, monkeypatch)
    trainer, notes = notes_of(broken)
    trainer.train()
    assert any("resumed at step" in note for note in notes) == (died_at >= 4)
    assert_identical(final_tensors(straight), final_tensors(broken))
    timeless = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics_of(straight)]
    assert timeless == [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics_of(broken)]


def test_a_finished_run_has_nothing_left_to_do(job: Callable[..., Job]) -> None:
    job().build(lambda _: None).train()
    trainer, notes = notes_of(job())
    assert trainer.train().step == 12
    assert "nothing left to train: the checkpoint is at step 12, the job has 12 steps" in notes


def test_a_run_can_be_prolonged(job: Callable[..., Job]) -> None:
    straight, prolonged = job("run.name=straight", "steps=20"), job("run.name=prolonged")
    straight.build(lambda _: None).train()
    prolonged.build(lambda _: None).train()
    job("run.name=prolonged", "steps=20").build(lambda _: None).train()
    assert_identical(final_tensors(straight), final_tensors(prolonged))


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(job: Callable[..., Job]) -> None:
    straight, broken = job("run.name=straight"), job("run.name=broken")
    straight.build(lambda _: None).train()
    broken.build(lambda _: None).train()
    newest = broken.run.directory / "checkpoints" / "step-00000012" / "tensors-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    trainer, notes = notes_of(broken)
    trainer.train()
    assert any(
        "the checksum of tensors-00000.safetensors is wrong, the file is damaged; trying the one before" in n
        for n in notes
    )
    assert "resumed at step 8 of 12" in notes
    assert_identical(final_tensors(straight), final_tensors(broken))


def test_never_and_must_are_taken_at_their_word(job: Callable[..., Job]) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint, but checkpoint.resume is 'must'"):
        job("checkpoint.resume=must").build(lambda _: None).train()
    job().build(lambda _: None).train()
    with pytest.raises(CheckpointError, match="holds checkpoints, but checkpoint.resume is 'never'"):
        job("checkpoint.resume=never").build(lambda _: None).train()


def test_a_checkpoint_of_another_model_is_refused(job: Callable[..., Job]) -> None:
    job().build(lambda _: None).train()
    before = (job().run.directory / "job.yaml").read_text()
    with pytest.raises(CheckpointError, match=r"is of another model: model.blocks: 2 there, 3 here; restore the model"):
        job(model={"name": "toy_model", "blocks": 3}).build(lambda _: None).train()
    assert (job().run.directory / "job.yaml").read_text() == before


def test_a_signal_finishes_the_step_saves_and_stops(job: Callable[..., Job]) -> None:
    straight, stopped = job("run.name=straight"), job("run.name=stopped")
    straight.build(lambda _: None).train()
    trainer, notes = notes_of(stopped)
    forward = trainer.step.executor.run

    def interrupt(pack: Any, scale: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return forward(pack, scale)

    trainer.step.executor.run = interrupt  # type: ignore[method-assign]
    outcome = trainer.train()
    assert (outcome.status, outcome.step) == ("stopped", 1)
    assert "SIGTERM: stopped after step 1 of 12 and saved; start again to continue" in notes
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not (stopped.run.directory / "model").exists()
    stopped.build(lambda _: None).train()
    assert_identical(final_tensors(straight), final_tensors(stopped))


# --- trackers, evaluation, strategies, fine-tuning


@pytest.mark.parametrize("mode", ["open", "write", "flush", "close"])
def test_a_failing_tracker_is_reported_once_and_never_ends_training(job: Callable[..., Job], mode: str) -> None:
    trainer, notes = notes_of(job(trackers=["jsonl", {"name": "toy_tracker", "fails_in": mode}]))
    assert trainer.train().status == "finished"
    assert len([note for note in notes if note.startswith("tracker 'toy_tracker' failed and is switched off")]) == 1


def test_evaluation_measures_the_same_data_each_time_and_disturbs_nothing(job: Callable[..., Job]) -> None:
    plain, evaluated = job("run.name=plain"), job("run.name=evaluated", evaluation={"every": 4, "data": "toy_data"})
    plain.build(lambda _: None).train()
    trainer = evaluated.build(lambda _: None)
    assert trainer.evaluator is not None
    assert trainer.evaluator.run() == trainer.evaluator.run()
    trainer.train()
    assert_identical(final_tensors(plain), final_tensors(evaluated))
    assert [line["step"] for line in metrics_of(evaluated) if "eval/loss" in line] == [4, 8, 12]


def test_a_strategy_that_matched_nothing_is_an_error(job: Callable[..., Job]) -> None:
    with pytest.raises(
        BuildError, match=r"parallel\[0\]: strategy 'toy_strategy' \(.*\) matched no module of the model"
    ):
        job(parallel=[{"name": "toy_strategy", "blocks": 0}]).build(lambda _: None)


def test_a_missing_model_trait_is_an_error_before_anything_is_built(job: Callable[..., Job]) -> None:
    text = r"parallel\[0\]: strategy 'toy_pipeline_strategy' needs model trait 'pipeline'; toy_model \(.*\) has: blocks"
    with pytest.raises(JobError, match=text):
        job(parallel=["toy_pipeline_strategy"]).build(lambda _: None)


def test_a_kernel_for_an_op_the_model_does_not_call_is_an_error(job: Callable[..., Job]) -> None:
    with pytest.raises(BuildError, match="kernels.attention: the model calls no op 'attention'; its ops are: none"):
        job(kernels={"attention": "sdpa"}).build(lambda _: None)


def test_a_mesh_that_does_not_fit_the_processes_is_an_error(job: Callable[..., Job]) -> None:
    text = "mesh: dp_shard=2 = 2 ranks, but the job was started with 1; change mesh or start 2 processes"
    with pytest.raises(JobError, match=text):
        job(mesh={"dp_shard": 2}).build(lambda _: None)


def test_a_fine_tuning_method_trains_only_what_it_names_and_is_merged_for_export(job: Callable[..., Job]) -> None:
    tuned = job(peft="toy_peft", metrics=[])
    trainer = tuned.build(lambda _: None)
    before = {name: p.detach().clone() for name, p in trainer.step.executor._stage.named_parameters()}
    trainer.train()
    after = dict(trainer.step.executor._stage.named_parameters())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["layers.0.weight"]
    exported = load_file(tuned.run.directory / "model" / "model-00001-of-00001.safetensors")
    assert exported["toy.scale"].item() == 2
    assert [name for name in final_tensors(tuned) if name.startswith("optimizer/")] == [
        "optimizer/layers.0.weight/momentum"
    ]


@pytest.mark.parametrize(
    ("trains", "text"),
    [([], "trains no parameter"), (["layers.9.weight"], r"parameters that do not exist: \['layers.9.weight'\]")],
)
def test_a_fine_tuning_method_without_effect_is_an_error(job: Callable[..., Job], trains: list[str], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        job(peft={"name": "toy_peft", "trains": trains}).build(lambda _: None)


def test_strategies_act_on_the_model_and_keep_its_names(job: Callable[..., Job]) -> None:
    plain, changed = (
        job("run.name=a").build(lambda _: None),
        job("run.name=b", parallel=["toy_strategy"]).build(lambda _: None),
    )
    assert list(plain.keeper._tensors()) == list(changed.keeper._tensors())
    assert plain.step(0, plain.feed.next()).loss != changed.step(0, changed.feed.next()).loss


def test_a_schedule_from_a_plugin_runs_the_same_step(job: Callable[..., Job]) -> None:
    own, foreign = job("run.name=a"), job("run.name=b", pipeline="toy_schedule")
    own.build(lambda _: None).train()
    foreign.build(lambda _: None).train()
    assert_identical(final_tensors(own), final_tensors(foreign))


@pytest.mark.parametrize(("forgets", "text"), [("backward", "B0.0 missing; B0.1 missing"), ("reduce", "R0 is missing")])
def test_a_schedule_that_forgets_an_action_is_refused(job: Callable[..., Job], forgets: str, text: str) -> None:
    with pytest.raises(BuildError, match=rf"pipeline: invalid program for 2 microbatch\(es\): .*{text}"):
        job(pipeline={"name": "toy_schedule", "forgets": forgets}).plan()


def test_several_stages_without_a_schedule_are_an_error(job: Callable[..., Job]) -> None:
    with pytest.raises(BuildError, match="mesh.pp is 2, but the job names no schedule; add 'pipeline: <name>'"):
        job(mesh={"pp": 2}).plan()


def test_data_that_does_not_fit_the_model_is_an_error(job: Callable[..., Job]) -> None:
    with pytest.raises(DataError, match="data has 3 features, model.features is 4"):
        job(data={"name": "toy_data", "features": 3}).build(lambda _: None)


def test_a_directory_that_cannot_be_written_is_an_error_before_training(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to .*; choose another run.dir"):
        job().build(lambda _: None)
