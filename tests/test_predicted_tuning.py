"""Predictions of fine-tuned models, and of what optimizers keep, agree with plans and with what was measured."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_planner.check import predicted
from d9d_planner.device import Device
from d9d_planner.prediction import predict

from tests.planned_jobs import DENSE, FEW_EXPERTS, GIB, SMALL, prediction, values

LORA = {"name": "lora", "r": 4}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora on everything": LORA | {"targets": ["all-linear", "embedding", "heads.*"], "exclude": ["layers.1.*"]},
    "dora": {"name": "dora", "r": 4, "targets": ["q_proj", "down_proj"]},
    "ia3": {"name": "ia3"},
    "full_tune": {"name": "full_tune", "match": ["layers.3.*", "norm", "heads.*"]},
    "stack": {"name": "stack", "methods": [LORA, {"name": "full_tune", "match": ["heads.*"]}]},
}


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [SMALL, FEW_EXPERTS], ids=["dense", "experts"])
def test_a_fine_tuned_model_stores_what_the_plan_counts(method: str, model: dict[str, Any]) -> None:
    peft = METHODS[method]
    if model is FEW_EXPERTS:
        banks = {"ia3": {"feedforward": []}, "dora": {"targets": ["q_proj", "o_proj"]}}
        peft = peft | banks.get(method, {"targets": ["all-linear", "*.experts.*"]} if method == "lora" else {})
    compare_with_plan(values(model, peft=peft, precision={"parameters": "bfloat16"}))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["lora", "dora", "full_tune"])
@pytest.mark.parametrize("mesh", [{"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}], ids=["tp, fsdp", "pp, fsdp"])
def test_layouts_share_what_fine_tuning_adds(method: str, mesh: dict[str, int]) -> None:
    strategies = ["fsdp", *(["tensor_parallel"] if "tp" in mesh else [])]
    sections = {"pipeline": "1f1b", "batch": {"size": 8, "microbatch": 1}} if "pp" in mesh else {}
    compare_with_plan(values(SMALL, peft=METHODS[method], mesh=mesh, parallel=strategies, **sections))


def compare_with_plan(job_values: dict[str, Any]) -> None:
    """Compare the predicted storage of the first rank with the tensors of the plan on the meta device."""
    from d9d_engine.job import Job

    job = Job.from_values(job_values)
    counted = job.plan().memory
    found = predict(job, job.registry, job.views(), Device.named("h200"))  # type: ignore[arg-type]
    stored = found.ranks[0]
    assert stored.parameters == pytest.approx(counted.parameters, rel=0.03)
    # Besides, each parameter has a counter.
    assert stored.optimizer == pytest.approx(counted.optimizer, rel=0.03, abs=100)
    stages = found.workload.stages(found.layout, 1e9)
    trained = sum(
        block.count * (block.parameters + block.expert_parameters - block.frozen - block.frozen_experts)
        for stage in stages
        for block in stage.blocks
    )
    if found.layout.mesh.world_size == 1:
        assert 2 * trained == counted.gradients


def test_memory_and_time_of_a_fine_tuned_model_are_as_measured() -> None:
    found = prediction(DENSE, peft={"name": "lora", "r": 16, "alpha": 32})
    assert found.memory.allocated / GIB == pytest.approx(30.7, rel=0.02)
    assert 1e3 * found.time.total == pytest.approx(316, rel=0.04)


def test_frozen_weights_take_no_gradients_and_fewer_products() -> None:
    whole, lora = prediction(DENSE), prediction(DENSE, peft=LORA)
    assert lora.memory.parameters == pytest.approx(whole.memory.parameters, rel=0.01)
    assert lora.memory.gradients + lora.memory.optimizer < 0.02 * whole.memory.optimizer
    # A third of the products of linear layers is left out, and small ones are added; attention is unchanged.
    assert 2 / 3 < lora.time.parts["products"] / whole.time.parts["products"] < 0.95
    assert lora.time.parts["attention"] == pytest.approx(whole.time.parts["attention"], rel=1e-12)
    assert lora.time.parts["optimizer"] < 0.02 * whole.time.parts["optimizer"]


def test_layers_before_the_first_trained_one_have_no_backward_and_keep_nothing() -> None:
    last = prediction(DENSE, peft={"name": "full_tune", "match": ["layers.27.*", "norm", "heads.*"]})
    whole = prediction(DENSE)
    assert last.memory.activations < whole.memory.activations / 20
    assert last.time.parts["attention"] < 0.4 * whole.time.parts["attention"]
    recomputed = prediction(
        DENSE,
        parallel=["activation_checkpointing", "compile"],
        peft={"name": "full_tune", "match": ["layers.27.*", "norm", "heads.*"]},
    )
    again = recomputed.time.parts["recomputation"]
    assert again < 0.1 * prediction(DENSE, parallel=["activation_checkpointing", "compile"]).time.parts["recomputation"]
    first = prediction(DENSE, peft={"name": "full_tune", "match": ["layers.0.*"]})
    assert first.time.parts["attention"] == pytest.approx(whole.time.parts["attention"])


def test_a_method_without_a_cost_description_is_not_predicted_and_said_so() -> None:
    from dataclasses import replace as replaced

    import d9d_data.plugin
    import d9d_nn.plugin
    import d9d_optim.plugin
    import d9d_parallel.plugin
    import d9d_peft.plugin
    import d9d_qwen3.plugin
    from d9d_core.plugin import hookimpl
    from d9d_core.registry.registry import Registry

    class Undescribed:
        D9D_API = 2

        @hookimpl
        def d9d_peft_methods(self) -> Any:
            return [replaced(spec, cost=None) for spec in d9d_peft.plugin.d9d_peft_methods()]

    plugins = [d9d_nn.plugin, d9d_data.plugin, d9d_optim.plugin, d9d_parallel.plugin, d9d_qwen3.plugin, Undescribed()]
    job = JobFile.from_values(values(SMALL, peft=LORA), registry=Registry.of(*plugins))
    (line,) = predicted(job, None)
    assert line.startswith("not predicted: peft: ")
    assert "has no cost description for a prediction" in line
    with pytest.raises(JobError, match="PeftSpec"):
        predicted(job, 80 * GIB)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [("muon", {}), ("lion", {}), ("schedule_free", {}), ("sgd", {}), ("muon", {"dp_shard": 2}), ("ema", {})],
    ids=["muon", "lion", "schedule_free", "sgd", "muon, fsdp", "ema"],
)
def test_states_of_every_optimizer_are_those_of_the_plan(optimizer: str, mesh: dict[str, int]) -> None:
    parallel = ["fsdp"] if mesh else []
    config = {"name": "ema", "of": {"name": "muon"}} if optimizer == "ema" else {"name": optimizer, "lr": 1e-4}
    compare_with_plan(values(SMALL, optimizer=config, mesh=mesh, parallel=parallel))
