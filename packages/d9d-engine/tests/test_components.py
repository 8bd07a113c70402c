from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError, DataError, JobError
from d9d_core.job_file.job import Mesh
from d9d_core.layout.check import covers
from d9d_core.plugin import hookimpl
from d9d_core.registry.registry import Registry
from d9d_engine.compose.plan import MemoryEstimate
from d9d_engine.job import Job
from d9d_testing.toy.data import ToyStream
from d9d_testing.toy.observers import ToyTracker
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, noted, quiet
from d9d_testing.toy.task import ToyMetric
from d9d_weights.graph.mappers import Rename
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.smoke


@pytest.mark.full
@pytest.mark.parametrize("mode", ["open", "write", "flush", "close"])
def test_a_failing_tracker_is_reported_once_and_never_ends_training(job: MakeJob, tmp_path: Path, mode: str) -> None:
    failing = {"name": "toy_tracker", "path": str(tmp_path / "calls"), "fails_in": mode}
    trainer, notes = noted(job(trackers=["jsonl", failing]))
    assert trainer.train().status == "finished"
    assert len([note for note in notes if note.startswith("tracker 'toy_tracker' failed and is switched off")]) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("state", [Path("x"), {"loss": float("nan")}])
def test_a_tracker_whose_state_is_no_json_is_switched_off_and_the_checkpoint_saved(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    monkeypatch.setattr(ToyTracker, "state", lambda _self: state)
    trainer, notes = noted(job(trackers=["toy_tracker"]))
    assert trainer.train().status == "finished"
    assert len([note for note in notes if note.startswith("tracker 'toy_tracker' failed and is switched off")]) == 1


def test_a_model_that_cannot_be_exported_trains_with_a_warning_and_exports_no_adapter(job: MakeJob) -> None:
    model = next(iter(toy.d9d_models()))

    @hookimpl
    def d9d_models() -> list[Any]:
        return [replace(model, hugging_face=None)]

    plain = SimpleNamespace(__name__="plain", d9d_models=d9d_models)
    others = SimpleNamespace(**{n: v for n, v in vars(toy).items() if n.startswith("d9d_") and n != "d9d_models"})
    registry = Registry.of(plain, others)
    (warning,) = job().use(registry).plan().warnings
    assert warning == (
        "export: model 'toy_model' (plain) has no Hugging Face layout, so the end of the run exports no model; "
        "checkpoints have the weights"
    )
    assert job("export=false").use(registry).plan().warnings == []
    trainer, notes = noted(job("steps=1").use(registry))
    trainer.train()
    assert f"warning: {warning}" in notes
    assert not (trainer.job.run.directory / "model").exists()
    with pytest.raises(JobError, match="export: model 'toy_model' .* has no Hugging Face layout; set 'export: false'"):
        job("export=adapter").use(registry).plan()


def test_a_layout_that_forgets_a_tensor_is_refused_before_training(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan and a build both refuse the job."""
    forgetful = lambda _self, _config: Rename("layers.0.weight", "first")  # noqa: E731
    monkeypatch.setattr("d9d_testing.toy.format.ToyFormat.exporter", forgetful)
    text = r"export: the Hugging Face layout d9d_testing.toy.format:ToyFormat of model (.|\n)*no mapper takes"
    with pytest.raises(BuildError, match=text):
        job().plan()
    with pytest.raises(BuildError, match=text):
        job().build()
    job("export=false").plan()


def test_a_metric_cannot_take_a_name_of_the_loop(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyMetric, "compute", lambda _self: {"finite": torch.zeros(()), "loss": torch.zeros(())})
    run = job()
    quiet(run).train()
    assert metrics_of(run)[0]["loss"] > 0
    assert metrics_of(run)[0]["toy_metric/loss"] == 0


def test_a_metric_that_computes_no_mapping_is_named(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyMetric, "compute", lambda _self: 7)
    with pytest.raises(BuildError, match=r"metric 'toy_metric': compute\(\) returned a int; return a mapping"):
        quiet(job()).train()


def test_a_metric_that_changes_its_state_is_refused(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ToyMetric.state
    monkeypatch.setattr(ToyMetric, "state", lambda self: {} if self._count else state(self))
    with pytest.raises(BuildError, match=r"metric 'toy_metric': update\(\) changed the names in state"):
        quiet(job("nonfinite=skip")).train()


def test_evaluation_measures_the_same_data_each_time_and_disturbs_nothing(job: MakeJob) -> None:
    plain, evaluated = job("run.name=plain"), job("run.name=evaluated", evaluation={"every": 4, "data": "toy_data"})
    quiet(plain).train()
    trainer = quiet(evaluated)
    assert trainer.evaluator is not None
    assert trainer.evaluator.run() == trainer.evaluator.run()
    trainer.train()
    assert_identical(final_tensors(plain), final_tensors(evaluated))
    assert [line["step"] for line in metrics_of(evaluated) if "eval/loss" in line] == [4, 8, 12]


def test_a_strategy_that_matched_nothing_is_an_error(job: MakeJob) -> None:
    with pytest.raises(
        BuildError, match=r"parallel\[0\]: strategy 'toy_strategy' \(.*\) changes no module of the model"
    ):
        quiet(job(parallel=[{"name": "toy_strategy", "blocks": 0}]))


def test_a_missing_model_trait_is_an_error_before_anything_is_built(job: MakeJob) -> None:
    text = r"parallel\[0\]: strategy 'toy_pipeline_strategy' needs model trait 'experts'; toy_model \(.*\) has: blocks"
    with pytest.raises(JobError, match=text):
        quiet(job(parallel=["toy_pipeline_strategy"]))


def test_a_kernel_for_an_op_the_model_does_not_call_is_an_error(job: MakeJob) -> None:
    with pytest.raises(
        BuildError,
        match="kernels.attention: the job calls no op 'attention'; remove it, or name an op of the job: gradient_power",
    ):
        quiet(job(kernels={"attention": "reference"}))


def test_a_mesh_that_does_not_fit_the_processes_is_an_error(job: MakeJob) -> None:
    text = "mesh: dp_shard=2 = 2 ranks, but the job was started with 1; change mesh or start 2 processes"
    with pytest.raises(JobError, match=text):
        quiet(job(mesh={"dp_shard": 2}))


@pytest.mark.thorough
def test_a_fine_tuning_method_trains_only_what_it_names_and_is_merged_for_export(job: MakeJob) -> None:
    tuned = job(peft="toy_peft", metrics=[])
    trainer = quiet(tuned)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    trainer.train()
    after = dict(trainer.stage.named_parameters())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["layers.0.weight"]
    exported = load_file(tuned.run.directory / "model" / "model.safetensors")
    assert exported["toy.scale"].item() == 2
    assert [name for name in final_tensors(tuned) if name.startswith("optimizer/")] == [
        "optimizer/layers.0.weight/momentum"
    ]


@pytest.mark.parametrize(
    ("trains", "text"),
    [
        ([], "selects no parameter to train"),
        (["layers.9.weight"], r"parameters that the model lacks: \['layers.9.weight'\]"),
    ],
)
def test_a_fine_tuning_method_without_effect_is_an_error(job: MakeJob, trains: list[str], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        quiet(job(peft={"name": "toy_peft", "trains": trains}))


def test_strategies_act_on_the_model_and_keep_its_names(job: MakeJob) -> None:
    plain, changed = (
        quiet(job("run.name=a")),
        quiet(job("run.name=b", parallel=["toy_strategy"])),
    )
    assert list(plain.checkpointer.tensors()) == list(changed.checkpointer.tensors())
    assert plain.step(0, plain.prefetcher.next()).loss != changed.step(0, changed.prefetcher.next()).loss


def test_a_number_that_overflows_is_not_a_tensor_that_is_too_large(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        torch.full((4,), 1e10, dtype=torch.float16)

    monkeypatch.setattr(ToyStream, "__init__", fail)
    with pytest.raises(RuntimeError, match="without overflow"):
        job().build()


def test_a_schedule_from_a_plugin_runs_the_same_step(job: MakeJob) -> None:
    own, foreign = job("run.name=a"), job("run.name=b", pipeline="toy_schedule")
    quiet(own).train()
    quiet(foreign).train()
    assert_identical(final_tensors(own), final_tensors(foreign))


@pytest.mark.parametrize(("forgets", "text"), [("backward", "B0.0 missing; B0.1 missing"), ("reduce", "R0 is missing")])
def test_a_schedule_that_forgets_an_action_is_refused(job: MakeJob, forgets: str, text: str) -> None:
    with pytest.raises(BuildError, match=rf"pipeline: invalid program for 2 microbatch\(es\): .*{text}"):
        job(pipeline={"name": "toy_schedule", "forgets": forgets}).plan()


def test_several_stages_without_a_schedule_are_an_error(job: MakeJob) -> None:
    text = "mesh.pp is 2, but no component of the job uses that axis; add a schedule to 'pipeline', or set it to 1"
    with pytest.raises(JobError, match=text):
        job(mesh={"pp": 2}).plan()


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "cp", "tp"])
def test_a_mesh_axis_that_nothing_uses_is_an_error(job: MakeJob, axis: str) -> None:
    with pytest.raises(JobError, match=f"mesh.{axis} is 2, but no component of the job uses that axis; add a strategy"):
        job(mesh={axis: 2}).plan()


def test_data_that_does_not_fit_the_model_is_an_error(job: MakeJob) -> None:
    with pytest.raises(DataError, match="data has 3 features, but model.features is 4"):
        quiet(job(data={"name": "toy_data", "features": 3}))


def test_evaluation_drops_nothing(job: MakeJob) -> None:
    trainer = quiet(job("model.dropout=0.5", evaluation={"every": 4, "data": "toy_data"}))
    assert trainer.evaluator is not None
    assert trainer.evaluator.run() == trainer.evaluator.run()
    assert trainer.stage.training


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"trackers": ["jsonl", "console", "jsonl"]}, r"trackers\[2\] is the same as trackers\[0\]; remove one"),
        ({"metrics": ["toy_metric", "toy_metric"]}, r"metrics\[1\] is the same as metrics\[0\]"),
        ({"precision": {"parameters": "float16"}}, "precision.parameters"),
        ({"run": {"name": ".."}}, "run.name"),
        ({"gradient_clipping": {"max_norm": "inf"}}, "gradient_clipping.max_norm"),
    ],
)
def test_a_job_that_cannot_mean_anything_is_refused(job: MakeJob, sections: Any, text: str) -> None:
    with pytest.raises(JobError, match=text):
        job(**sections)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_expert_groups_never_straddle_an_axis(tp: int, cp: int, dp_shard: int, ep: int) -> None:
    inner = [tp, cp, dp_shard]
    legal = {math.prod(inner[:i]) * d for i in range(3) for d in range(1, inner[i] + 1) if inner[i] % d == 0}
    assert covers(ep, Mesh(tp=tp, cp=cp, dp_shard=dp_shard, ep=ep)) == (ep in legal)


def test_a_directory_that_cannot_be_written_is_an_error_before_training(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to .*; choose another run.dir"):
        quiet(job())


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps"])
def test_a_job_for_a_device_this_machine_lacks_can_be_checked_but_not_trained(job: MakeJob, device: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine may have the device")
    found = job(f"device={device}").plan()
    assert found.parameters == (33, 33)
    assert found.memory == MemoryEstimate(parameters=132, gradients=132, optimizer=132, frozen=0)
    with pytest.raises(JobError, match=f"device: '{device}' is not available here; available: auto, cpu"):
        quiet(job(f"device={device}"))
    with pytest.raises(JobError, match="device: torch knows no 'toaster'"):
        job("device=toaster").plan()


def test_a_job_of_config_objects_takes_what_is_installed_and_looks_once(job: MakeJob) -> None:
    parts = {name: getattr(job(), name) for name in ("model", "task", "data", "optimizer", "batch", "steps")}
    made = Job(**parts)
    assert made.registry.find("tracker", "jsonl").spec.name == "jsonl"
    assert made.registry is made.registry


def test_a_plan_counts_what_each_parameter_costs(job: MakeJob) -> None:
    memory = job().plan().memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (33 * 4,) * 3


def test_the_memory_of_a_plan_is_the_sum_of_its_items() -> None:
    assert MemoryEstimate(parameters=1, gradients=10, optimizer=100, frozen=1000, host=10000).total == 1111
