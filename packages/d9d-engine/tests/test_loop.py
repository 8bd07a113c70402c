from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError, NonFiniteError
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_engine.step.clip import Clipper, GradientNorm
from d9d_engine.step.executor import StageLoss
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, quiet

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.smoke


@pytest.mark.thorough
def test_a_run_leaves_everything_that_is_promised(job: MakeJob) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots'")
    trained = job(trackers=["console", "jsonl"])
    outcome = quiet(trained).train()
    assert (outcome.status, outcome.step) == ("finished", 12)
    directory = trained.run.directory
    assert {path.name for path in directory.iterdir()} == {
        "job.yaml", "plugins.json", "facts.json", "metrics.jsonl", "loss.svg", "checkpoints", "model", "finished.json",
        "tokenizer",
    }  # fmt: skip
    assert sorted(path.name for path in (directory / "checkpoints").glob("step-*")) == [
        "step-00000008",
        "step-00000012",
    ]
    assert {path.name for path in (directory / "model").iterdir()} == {
        "README.md", "config.json", "features.txt", "model.safetensors",
    }  # fmt: skip
    facts = json.loads((directory / "facts.json").read_text())
    assert facts["parameters"] == facts["trained_parameters"] > 0
    assert (directory / "loss.svg").read_text().count("<path") > 3
    lines = metrics_of(trained)
    assert [line["step"] for line in lines] == [1, 5, 10, 12]
    assert {"loss", "loss/error", "loss/decay", "grad_norm", "lr", "tokens", "tokens_per_second", "absolute_error"} <= (
        lines[0].keys()
    )
    # The manual lists these names: series of the steps have no prefix, series of one kind share a prefix.
    assert {name for name in lines[0] if "/" not in name} == {
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "absolute_error",
    }  # fmt: skip
    assert {name.split("/")[0] for line in lines for name in line if "/" in name} <= {"loss", "eval", "memory"}
    assert lines[-1]["tokens"] == 12 * 8
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[1]["loss"] == pytest.approx(lines[1]["loss/error"] + 0.01 * lines[1]["loss/decay"])


def test_the_job_file_that_a_run_leaves_runs_again_to_the_same_weights(job: MakeJob) -> None:
    first = job()
    quiet(first).train()
    again = Job.load(first.run.directory / "job.yaml", registry=first.registry, overrides=["run.name=again"])
    quiet(again).train()
    assert_identical(final_tensors(first), final_tensors(again))


@pytest.mark.parametrize("microbatch", [1, 2, 8])
def test_gradient_accumulation_changes_nothing(job: MakeJob, microbatch: int) -> None:
    whole, parts = job("batch.microbatch=4", "run.name=a"), job(f"batch.microbatch={microbatch}", "run.name=b")
    quiet(whole).train()
    quiet(parts).train()
    for name, tensor in final_tensors(whole).items():
        torch.testing.assert_close(final_tensors(parts)[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_a_step_equals_plain_pytorch(job: MakeJob) -> None:
    trainer = quiet(job("gradient_clipping.max_norm=0.5"))
    stage = trainer.stage
    plain = {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()}
    pack = trainer.prefetcher.next()
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


def test_a_pack_in_which_nothing_counts_gives_zero_and_no_nan(job: MakeJob) -> None:
    masked = job(data={"name": "toy_data", "masked_at": 4})
    quiet(masked).train()
    line = metrics_of(masked)[1]
    assert line["step"] == 5
    assert line["loss/error"] == 0
    assert all(value is not None for values in metrics_of(masked) for value in values.values())


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_clipping_scales_and_null_only_measures(job: MakeJob, max_norm: float | None) -> None:
    trainer = quiet(job(gradient_clipping={"max_norm": max_norm}))
    before = [p.detach().clone() for p in trainer.stage.parameters()]
    result = trainer.step(0, trainer.prefetcher.next())
    after = list(trainer.stage.parameters())
    moved = torch.stack([(a - b).norm() for a, b in zip(after, before, strict=True)]).norm() / 0.05
    expected = result.grad_norm.item() if max_norm is None else max_norm
    assert moved.item() == pytest.approx(expected, rel=1e-3)


def test_a_nonfinite_step_ends_the_run_and_is_never_saved(job: MakeJob, tmp_path: Path) -> None:
    recorder = {"name": "toy_recorder", "path": str(tmp_path / "events")}
    failing = job(data={"name": "toy_data", "nan_at": 6}, subscribers=[recorder])
    with pytest.raises(NonFiniteError, match=r"step 7: loss is nan and grad_norm is nan; this step changed nothing"):
        quiet(failing).train()
    assert [p.name for p in CheckpointStore(failing.run.directory / "checkpoints", None).paths()] == ["step-00000004"]
    assert (tmp_path / "events").read_text().split()[-1] == "TrainingFailed"


def test_a_skipped_step_leaves_weights_and_moments_as_they_were(job: MakeJob) -> None:
    skipping = job("nonfinite=skip", data={"name": "toy_data", "nan_at": 6})
    trainer = quiet(skipping)
    for step in range(6):
        trainer.step(step, trainer.prefetcher.next())
    before = {name: tensor.clone() for name, tensor in trainer.checkpointer.tensors().items() if "metrics" not in name}
    result = trainer.step(6, trainer.prefetcher.next())
    assert not result.finite
    after = trainer.checkpointer.tensors()
    assert_identical(before, {name: after[name] for name in before})


def test_skipped_steps_are_counted_and_logged_as_null(job: MakeJob) -> None:
    skipping = job("nonfinite=skip", data={"name": "toy_data", "nan_at": 4}, metrics=[])
    quiet(skipping).train()
    lines = metrics_of(skipping)
    assert (lines[1]["step"], lines[1]["loss"], lines[1]["skipped_steps"]) == (5, None, 1.0)
    assert lines[-1]["loss"] is not None


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
def test_the_gradient_norm_is_the_one_asked_for(job: MakeJob, p: float) -> None:
    trainer = quiet(job(gradient_clipping={"max_norm": None, "p": str(p)}))
    gradients: list[torch.Tensor] = []
    clip = trainer.step.clipper.clip

    def spy(loss: StageLoss, tokens: int) -> Any:
        gradients.extend(parameter.grad.clone() for parameter in trainer.stage.parameters())  # type: ignore[union-attr]
        return clip(loss, tokens)

    trainer.step.clipper.clip = spy  # type: ignore[method-assign]
    norm = trainer.step(0, trainer.prefetcher.next()).grad_norm
    expected = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]), p)
    torch.testing.assert_close(norm, expected)


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.randn(1000, generator=generator).bfloat16()
    exact = torch.cat([p.grad.double() for p in parameters]).norm()  # type: ignore[union-attr]
    clipper = Clipper(
        dict(zip("abcde", parameters, strict=True)), {"error": 1.0}, Topology(), max_norm=1.0, norm=GradientNorm(2.0)
    )
    totals = clipper.clip(StageLoss({"error": torch.zeros(())}), tokens=0)
    norm = totals.grad_norm
    assert norm.dtype == torch.float32
    assert totals.finite
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    clipped = torch.cat([p.grad.double() for p in parameters]).norm()  # type: ignore[union-attr]
    assert clipped.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "parameters", "outputs"),
    [
        ({}, torch.float32, torch.float32),
        ({"parameters": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"autocast": "bfloat16"}, torch.float32, torch.bfloat16),
    ],
)
def test_precision_sets_the_formats_of_parameters_and_products(
    job: MakeJob, precision: dict[str, str], parameters: torch.dtype, outputs: torch.dtype
) -> None:
    trainer = quiet(job(precision=precision))
    seen: list[torch.dtype] = []
    block = next(iter(trainer.stage.blocks().values()))  # type: ignore[operator]
    block.dropout.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    pack = [{n: t.to(parameters) if n != "mask" else t for n, t in mb.items()} for mb in trainer.prefetcher.next()]
    trainer.step(0, pack)
    assert {parameter.dtype for parameter in trainer.stage.parameters()} == {parameters}
    assert set(seen) == {outputs}


def test_initial_weights_depend_on_seed_and_name_only(job: MakeJob) -> None:
    def weights(*overrides: str) -> dict[str, torch.Tensor]:
        return dict(quiet(job(*overrides)).stage.named_parameters())

    small, large, other = weights(), weights("model.blocks=5"), weights("seed=1")
    assert torch.equal(small["layers.1.weight"], large["layers.1.weight"])
    assert not torch.equal(small["layers.0.weight"], small["layers.1.weight"])
    assert not torch.equal(small["layers.0.weight"], other["layers.0.weight"])


def test_training_leaves_the_callers_random_numbers_alone(job: MakeJob) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    quiet(job("model.dropout=0.5")).train()
    assert torch.equal(torch.rand(3), expected)


def test_a_skipped_step_counts_in_no_statistic(job: MakeJob) -> None:
    skipping = job("nonfinite=skip", data={"name": "toy_data", "nan_at": 6})
    quiet(skipping).train()
    assert all(line["absolute_error"] is not None for line in metrics_of(skipping))


def test_epochs_are_as_many_steps_as_their_samples_fill(job: MakeJob) -> None:
    data = {"name": "toy_data", "samples": 50}
    for epochs, steps in ((1.5, 10), (0.1, 1), (1.12, 7)):  # 75, 5 and 56 samples in batches of 8
        trained = job(f"run.name=of-{epochs}", steps=None, epochs=epochs, data=data)
        notes: list[str] = []
        trainer = trained.build(notes.append)
        assert trainer.train().step == trainer.total_steps == steps
        assert any(f"{steps} steps" in note for note in notes)
    longer = job("run.name=of-0.1", steps=None, epochs=0.32, data=data)
    assert quiet(longer).train().step == 2


def test_epochs_of_data_without_a_number_of_samples_are_refused(job: MakeJob) -> None:
    endless = job(steps=None, epochs=2)
    with pytest.raises(
        JobError, match=r"epochs: dataset 'toy_data' .* does not give the number of samples .* by 'steps'"
    ):
        quiet(endless)
    endless.plan()  # no call reads the data
