from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import torch
from d9d_core.config.job import Mesh
from d9d_core.errors import BuildError, CheckpointError, DataError, JobError, NonFiniteError
from d9d_core.job import Job
from d9d_core.loop import events as ev
from d9d_core.loop.gradients import Clipper
from d9d_core.loop.trainer import Trainer
from d9d_core.plugin import Registry
from d9d_core.state.checkpoint import CheckpointStore
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
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
    assert sorted(path.name for path in (directory / "checkpoints").glob("step-*")) == ["step-00000008", "step-00000012"]
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
    stage = trainer.stage
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
    before = [p.detach().clone() for p in trainer.stage.parameters()]
    result = trainer.step(0, trainer.feed.next())
    after = list(trainer.stage.parameters())
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
    before = {name: tensor.clone() for name, tensor in trainer.keeper.tensors().items() if "metrics" not in name}
    result = trainer.step(6, trainer.feed.next())
    assert not result.finite
    after = trainer.keeper.tensors()
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
    logs = [
        [(line["step"], line["loss"], line["absolute_error"]) for line in metrics_of(run) if line["step"] % 5 == 0]
        for run in (straight, prolonged)
    ]
    assert logs[0] == logs[1]


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
    with pytest.raises(CheckpointError, match=r"is of another model: model.blocks: 2 there, 3 here; restore the job"):
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
def test_a_failing_tracker_is_reported_once_and_never_ends_training(
    job: Callable[..., Job], tmp_path: Path, mode: str
) -> None:
    failing = {"name": "toy_tracker", "path": str(tmp_path / "calls"), "fails_in": mode}
    trainer, notes = notes_of(job(trackers=["jsonl", failing]))
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
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    trainer.train()
    after = dict(trainer.stage.named_parameters())
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
    assert list(plain.keeper.tensors()) == list(changed.keeper.tensors())
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
    text = "mesh.pp is 2, but nothing in the job uses that axis; add a schedule to 'pipeline', or set it to 1"
    with pytest.raises(JobError, match=text):
        job(mesh={"pp": 2}).plan()


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "cp", "tp"])
def test_a_mesh_axis_that_nothing_uses_is_an_error(job: Callable[..., Job], axis: str) -> None:
    with pytest.raises(JobError, match=f"mesh.{axis} is 2, but nothing in the job uses that axis; add a strategy"):
        job(mesh={axis: 2}).plan()


def test_data_that_does_not_fit_the_model_is_an_error(job: Callable[..., Job]) -> None:
    with pytest.raises(DataError, match="data has 3 features, model.features is 4"):
        job(data={"name": "toy_data", "features": 3}).build(lambda _: None)


# --- numbers in corners


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
def test_the_gradient_norm_is_the_one_asked_for(job: Callable[..., Job], p: float) -> None:
    trainer = job(gradient_clipping={"max_norm": None, "p": str(p)}).build(lambda _: None)
    gradients: list[torch.Tensor] = []
    clip = trainer.step.clipper.clip

    def spy(loss: torch.Tensor) -> Any:
        gradients.extend(parameter.grad.clone() for parameter in trainer.stage.parameters())  # type: ignore[union-attr]
        return clip(loss)

    trainer.step.clipper.clip = spy  # type: ignore[method-assign]
    norm = trainer.step(0, trainer.feed.next()).grad_norm
    expected = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]), p)
    torch.testing.assert_close(norm, expected)


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.randn(1000, generator=generator).bfloat16()
    exact = torch.cat([p.grad.double() for p in parameters]).norm()  # type: ignore[union-attr]
    norm, finite = Clipper(parameters, 1.0, 2.0).clip(torch.zeros(()))
    assert norm.dtype == torch.float32
    assert finite
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    clipped = torch.cat([p.grad.double() for p in parameters]).norm()  # type: ignore[union-attr]
    assert clipped.item() == pytest.approx(1.0, rel=1e-3)


def test_an_infinite_p_survives_checkpoint_and_resume(job: Callable[..., Job]) -> None:
    job("gradient_clipping.p=.inf").build(lambda _: None).train()
    trainer, notes = notes_of(job("gradient_clipping.p=.inf", "steps=14"))
    assert trainer.train().step == 14
    assert [note for note in notes if note.startswith("changed")] == ["changed since step-00000012: steps: 12 -> 14"]


@pytest.mark.parametrize(
    ("precision", "parameters", "outputs"),
    [
        ({}, torch.float32, torch.float32),
        ({"parameters": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"autocast": "bfloat16"}, torch.float32, torch.bfloat16),
    ],
)
def test_precision_sets_the_formats_of_parameters_and_products(
    job: Callable[..., Job], precision: dict[str, str], parameters: torch.dtype, outputs: torch.dtype
) -> None:
    trainer = job(precision=precision).build(lambda _: None)
    seen: list[torch.dtype] = []
    block = next(iter(trainer.stage.blocks().values()))  # type: ignore[operator]
    block.dropout.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    pack = [{n: t.to(parameters) if n != "mask" else t for n, t in mb.items()} for mb in trainer.feed.next()]
    trainer.step(0, pack)
    assert {parameter.dtype for parameter in trainer.stage.parameters()} == {parameters}
    assert set(seen) == {outputs}


def test_initial_weights_depend_on_seed_and_name_only(job: Callable[..., Job]) -> None:
    def weights(*overrides: str) -> dict[str, torch.Tensor]:
        return dict(job(*overrides).build(lambda _: None).stage.named_parameters())

    small, large, other = weights(), weights("model.blocks=5"), weights("seed=1")
    assert torch.equal(small["layers.1.weight"], large["layers.1.weight"])
    assert not torch.equal(small["layers.0.weight"], small["layers.1.weight"])
    assert not torch.equal(small["layers.0.weight"], other["layers.0.weight"])


def test_training_leaves_the_callers_random_numbers_alone(job: Callable[..., Job]) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    job("model.dropout=0.5").build(lambda _: None).train()
    assert torch.equal(torch.rand(3), expected)


def test_dropout_is_drawn_anew_each_step_and_the_same_after_a_resume(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, broken = job("run.name=a", "model.dropout=0.5"), job("run.name=b", "model.dropout=0.5")
    straight.build(lambda _: None).train()
    torch.manual_seed(99)
    run_until(broken, 6, monkeypatch)
    torch.manual_seed(7)
    broken.build(lambda _: None).train()
    assert_identical(final_tensors(straight), final_tensors(broken))
    trainer = job("run.name=c", "model.dropout=0.5", "optimizer.lr=0.0").build(lambda _: None)
    pack = trainer.feed.next()
    assert trainer.step(0, pack).loss != trainer.step(1, pack).loss


def test_evaluation_drops_nothing(job: Callable[..., Job]) -> None:
    trainer = job("model.dropout=0.5", evaluation={"every": 4, "data": "toy_data"}).build(lambda _: None)
    assert trainer.evaluator is not None
    assert trainer.evaluator.run() == trainer.evaluator.run()
    assert trainer.stage.training


def test_a_skipped_step_counts_in_no_statistic(job: Callable[..., Job]) -> None:
    skipping = job("nonfinite=skip", data={"name": "toy_data", "nan_at": 6})
    skipping.build(lambda _: None).train()
    assert all(line["absolute_error"] is not None for line in metrics_of(skipping))


def test_the_count_of_skipped_steps_survives_a_resume(job: Callable[..., Job]) -> None:
    data = {"name": "toy_data", "nan_at": 2}
    job("nonfinite=skip", data=data).build(lambda _: None).train()
    job("nonfinite=skip", "steps=20", data=data).build(lambda _: None).train()
    assert metrics_of(job())[-1]["skipped_steps"] == 1


def test_trackers_continue_the_run_they_had_even_if_one_failed_in_between(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    calls = tmp_path / "calls"

    def train(steps: int, fails_in: str) -> None:
        tracker = {"name": "toy_tracker", "path": str(calls), "fails_in": fails_in}
        job(f"steps={steps}", trackers=[tracker]).build(lambda _: None).train()

    train(4, "nothing")
    train(8, "open")
    train(12, "nothing")
    opened = [line for line in calls.read_text().splitlines() if line.startswith("open")]
    assert opened == [
        f"open toy at {n} with {state}" for n, state in ((0, None), (4, {"id": "toy-1"}), (8, {"id": "toy-1"}))
    ]


# --- resume with a changed job


@pytest.mark.parametrize(
    ("override", "text"),
    [("seed=5", "is of another run: seed: 0 there, 5 here"), ("precision.parameters=bfloat16", "precision.parameters")],
)
def test_what_a_resumed_run_may_not_change_is_refused(job: Callable[..., Job], override: str, text: str) -> None:
    job().build(lambda _: None).train()
    with pytest.raises(CheckpointError, match=text):
        job(override).build(lambda _: None).train()


def test_what_a_resumed_run_does_change_is_said(job: Callable[..., Job]) -> None:
    job().build(lambda _: None).train()
    trainer, notes = notes_of(job("steps=14", "optimizer.lr=0.01", "batch.size=4"))
    trainer.train()
    assert [note.partition(": ")[2] for note in notes if note.startswith("changed since step-00000012")] == [
        "batch.size: 8 -> 4", "optimizer.lr: 0.05 -> 0.01", "steps: 12 -> 14",
    ]  # fmt: skip


def test_metrics_can_come_and_go_between_resumes(job: Callable[..., Job]) -> None:
    job("steps=3").build(lambda _: None).train()
    job("steps=6", metrics=[]).build(lambda _: None).train()
    trainer, notes = notes_of(job("steps=9"))
    trainer.train()
    assert "warning: metric 'toy_metric' is not in step-00000006 and starts anew" in notes


def test_after_a_damaged_checkpoint_new_ones_are_kept(job: Callable[..., Job]) -> None:
    broken = job("checkpoint.keep=1", "checkpoint.every=1", "steps=8")
    broken.build(lambda _: None).train()
    checkpoints = broken.run.directory / "checkpoints"
    (checkpoints / "step-00000012").mkdir()
    (checkpoints / "step-00000012" / "manifest.json").write_text("{")
    trainer, notes = notes_of(job("checkpoint.keep=1", "checkpoint.every=1", "steps=10"))
    trainer.train()
    assert any("a damaged checkpoint was set aside as" in note for note in notes)
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000010", "step-00000012.damaged"]


def test_two_runs_in_one_directory_are_refused(job: Callable[..., Job]) -> None:
    first, second = job().build(lambda _: None), job().build(lambda _: None)
    with (
        first.keeper.store.opened(),
        pytest.raises(CheckpointError, match=r"in use by another training run.*process \d+"),
    ):
        second.train()
    assert second.train().status == "finished"


def test_a_failing_subscriber_to_a_failure_does_not_hide_it(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = {"name": "toy_recorder", "path": str(tmp_path / "events")}
    trainer = job(data={"name": "toy_data", "nan_at": 1}, subscribers=[recorder]).build(lambda _: None)
    emit = trainer.events.emit

    def fail(event: object) -> None:
        if isinstance(event, ev.TrainingFailed):
            raise ZeroDivisionError
        emit(event)

    monkeypatch.setattr(trainer.events, "emit", fail)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert caught.value.__notes__ == ["besides, a subscriber to TrainingFailed raised ZeroDivisionError()"]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"trackers": ["jsonl", "console", "jsonl"]}, r"trackers\[2\] is the same as trackers\[0\]; remove one"),
        ({"metrics": ["toy_metric", "toy_metric"]}, r"metrics\[1\] is the same as metrics\[0\]"),
        ({"precision": {"parameters": "float16"}}, "precision.parameters"),
        ({"run": {"name": ".."}}, "run.name"),
        ({"mesh": {"ep": 7}}, "7 expert groups must cover whole inner axes and divide the next one; here tp=1, cp=1"),
        ({"gradient_clipping": {"max_norm": "inf"}}, "gradient_clipping.max_norm"),
    ],
)
def test_a_job_that_cannot_mean_anything_is_refused(job: Callable[..., Job], sections: Any, text: str) -> None:
    with pytest.raises(JobError, match=text):
        job(**sections)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_expert_groups_never_straddle_an_axis(tp: int, cp: int, dp_shard: int, ep: int) -> None:
    inner = [tp, cp, dp_shard]
    legal = {math.prod(inner[:i]) * d for i in range(3) for d in range(1, inner[i] + 1) if inner[i] % d == 0}
    try:
        Mesh(tp=tp, cp=cp, dp_shard=dp_shard, ep=ep)
    except ValidationError:
        assert ep not in legal
    else:
        assert ep in legal


def test_a_directory_that_cannot_be_written_is_an_error_before_training(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to .*; choose another run.dir"):
        job().build(lambda _: None)
