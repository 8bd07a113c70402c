"""Predictions agree with what was measured on an H200 and with what plans count, and follow the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from d9d_core.job import JobFile
from d9d_planner.device import Device
from d9d_planner.prediction import Prediction, predict

from tests.planned_jobs import DENSE, EXPERTS, FEW_EXPERTS, GIB, SMALL, prediction, values

# --- against measurements: one H200, 4 x 4,096 tokens, compiled, parameters and states in bfloat16 -------------------


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "gib", "ms"), [(DENSE, 42.3, 360), (EXPERTS, 53.4, 207)], ids=["dense", "experts"])
def test_memory_and_time_of_one_device_are_as_measured(model: dict[str, Any], gib: float, ms: float) -> None:
    found = prediction(model)
    assert found.memory.allocated / GIB == pytest.approx(gib, rel=0.02)
    assert 1e3 * found.time.total == pytest.approx(ms, rel=0.04)


def test_parts_of_the_time_of_a_dense_step_are_as_measured() -> None:
    parts = prediction(DENSE).time.parts
    for name, ms in (("products", 242), ("attention", 62), ("elementwise", 40), ("optimizer", 7), ("idle", 4.5)):
        assert 1e3 * parts[name] == pytest.approx(ms, rel=0.15), name


def test_lengths_are_those_that_the_data_states() -> None:
    short = prediction(DENSE, data={"name": "text", "sources": ["x"], "sequence_length": 1024})
    padded = {"name": "documents", "sources": ["x"], "sequence_length": 2048, "pad_multiple": 64}
    documents = prediction(DENSE, data=padded)
    assert short.workload.length == 1024
    assert documents.workload.length == 2048
    assert documents.workload.notes == ["samples have up to 2,048 positions; all are counted with this length"]


def test_the_peak_of_recomputed_experts_is_in_the_backward_of_the_first_block() -> None:
    long = EXPERTS | {"max_positions": 16384}
    found = prediction(long, batch={"size": 1}, parallel=["activation_checkpointing", "compile"]).memory
    assert found.allocated / GIB == pytest.approx(48.4, rel=0.1)  # measured on one H200
    assert found.activations == 2 * 16384 * 2048  # the input of the first block alone
    assert found.workspace > 3 * GIB


def test_each_text_of_a_sample_is_a_row() -> None:
    pairs = {"name": "preference", "sources": ["x"], "sequence_length": 4096}
    one, two = prediction(DENSE), prediction(DENSE, data=pairs)
    assert two.workload.texts == 2
    assert two.memory.activations == pytest.approx(2 * one.memory.activations, rel=0.01)
    assert two.tokens_per_second == pytest.approx(one.tokens_per_second, rel=0.1)


def test_muon_takes_less_memory_and_more_time_than_adamw() -> None:
    adamw, muon = prediction(DENSE), prediction(DENSE, optimizer={"name": "muon", "lr": 1e-4})
    assert muon.memory.optimizer < 0.75 * adamw.memory.optimizer
    assert muon.time.parts["optimizer"] > 10 * adamw.time.parts["optimizer"]
    shared = prediction(
        DENSE, optimizer={"name": "muon", "lr": 1e-4}, mesh={"dp_shard": 4}, parallel=["compile", "fsdp"]
    )
    assert shared.time.parts["optimizer"] < muon.time.parts["optimizer"] / 3


# --- what layouts change ----------------------------------------------------------------------------------------------


def test_small_microbatches_wait_for_the_host_that_launches_them() -> None:
    short = {"data": {"name": "text", "sources": ["x"], "sequence_length": 1024}, "batch": {"size": 8}}
    whole, small = (prediction(DENSE, **{**short, "batch": {"size": 8, "microbatch": n}}).time for n in (8, 1))
    launched = Device.named("h200").launch * DENSE["num_layers"]
    assert whole.parts["host"] == 0
    assert small.total > 8 * launched > 1.5 * whole.total
    assert small.bound.startswith("host")


def test_recomputation_trades_activations_for_a_forward() -> None:
    plain, recomputed = prediction(DENSE), prediction(DENSE, parallel=["activation_checkpointing", "compile"])
    assert recomputed.memory.activations < plain.memory.activations / 5
    assert plain.time.total * 1.2 < recomputed.time.total < plain.time.total * 1.34


def test_sharding_divides_what_is_stored() -> None:
    alone = prediction(DENSE).memory
    shards = prediction(DENSE, mesh={"dp_shard": 4}, parallel=["compile", "fsdp"], batch={"size": 16}).memory
    copies = prediction(DENSE, mesh={"dp_replicate": 4}, parallel=["compile", "replicate"], batch={"size": 16}).memory
    assert (4 * shards.parameters, 4 * shards.optimizer) == (alone.parameters, alone.optimizer)
    assert (copies.parameters, copies.optimizer) == (alone.parameters, alone.optimizer)
    assert shards.activations == copies.activations == alone.activations
    assert copies.communication == 0  # gradients are reduced where they are
    formats = ["compile", {"name": "replicate", "compute_dtype": "bfloat16"}]
    wrapped = prediction(DENSE, mesh={"dp_replicate": 4}, parallel=formats, batch={"size": 16}).memory
    assert wrapped.communication > wrapped.parameters  # copies, from the forward to the backward


@pytest.mark.thorough
def test_sharding_copies_what_changes_its_format_or_has_replicas() -> None:
    fast, slow = (Device.named("h100").model_copy(update={"copy_bytes": rate}) for rate in (3e12, 1e12))

    def copied(strategy: dict[str, Any], **mesh: int) -> float:
        job = JobFile.from_values(values(SMALL, mesh=mesh, parallel=[strategy]))
        times = [
            predict(job, job.registry, job.views(), rates).time.parts["data parallelism"] for rates in (fast, slow)
        ]
        return times[1] - times[0]

    plain = copied({"name": "fsdp"}, dp_shard=2)
    assert plain <= 0  # computation is slower, too, and hides more
    assert copied({"name": "fsdp", "reduce_dtype": "float32"}, dp_shard=2) > plain
    assert copied({"name": "fsdp", "compute_dtype": "float32"}, dp_shard=2) > plain
    assert copied({"name": "fsdp", "offload": True}, dp_shard=2) > plain
    assert copied({"name": "hsdp"}, dp_shard=2, dp_replicate=2) > plain


def test_the_first_pipeline_rank_holds_most_microbatches_and_the_last_has_logits() -> None:
    found = prediction(DENSE, mesh={"pp": 4}, pipeline="1f1b", batch={"size": 16, "microbatch": 1})
    activations = [rank.activations for rank in found.ranks]
    assert activations == sorted(activations, reverse=True)
    assert [rank.logits > 0 for rank in found.ranks] == [False, False, False, True]


def test_more_microbatches_make_the_bubble_smaller() -> None:
    few, many = (
        prediction(DENSE, mesh={"pp": 4}, pipeline="1f1b", batch={"size": count, "microbatch": 1}).time
        for count in (4, 32)
    )
    assert few.parts["bubble"] / few.total == pytest.approx(3 / 7, abs=0.12)
    assert many.parts["bubble"] / many.total < 0.15


def test_skipping_the_steady_part_of_a_schedule_changes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"mesh": {"pp": 2}, "pipeline": "1f1b", "batch": {"size": 24, "microbatch": 1}}
    shortened = prediction(DENSE, **sections).time.total
    monkeypatch.setattr("d9d_planner.step_time.steady", lambda ranks: 24 * ranks)
    assert prediction(DENSE, **sections).time.total == pytest.approx(shortened)


def test_tensor_parallelism_shares_activations_and_exchanges_them() -> None:
    alone, shared = prediction(DENSE), prediction(DENSE, mesh={"tp": 2}, parallel=["compile", "tensor_parallel"])
    assert 0.5 < shared.memory.activations / alone.memory.activations < 0.65
    assert shared.time.parts["tensor parallelism"] > 0


def test_products_hide_the_exchanges_of_asynchronous_tensor_parallelism() -> None:
    def times(asynchronous: bool, device: Device) -> tuple[float, float]:
        strategy = {"name": "tensor_parallel", "asynchronous": asynchronous}
        found = replace(prediction(DENSE, mesh={"tp": 2}, parallel=["compile", strategy]), device=device)
        return found.time.parts["tensor parallelism"], found.time.total

    h200 = Device.named("h200")
    (waited, whole), (beside, shorter) = (times(asynchronous, h200) for asynchronous in (False, True))
    # What products get slower by remains, and what embedding and heads wait for.
    assert h200.interference * waited < beside < 0.8 * waited
    assert whole - shorter == pytest.approx((waited - beside) * (1 + h200.overhead))
    slow = h200.model_copy(update={"link": 1e9})
    assert times(True, slow)[0] > 0.8 * times(False, slow)[0]  # products are too short


def context_parallel(method: str, **sections: Any) -> Prediction:
    inner = {"head_ranks": 2} if method == "hybrid" else {}
    strategy = {"name": "context_parallel", "method": method, **inner}
    return prediction(DENSE, **{"mesh": {"cp": 4}, "parallel": ["compile", strategy], **sections})


def test_context_parallelism_shares_activations_and_sums_gradients() -> None:
    alone, shared = prediction(DENSE), context_parallel("ring")
    assert 4 * shared.memory.activations == pytest.approx(alone.memory.activations, rel=0.01)
    assert shared.memory.parameters == alone.memory.parameters
    assert shared.time.parts["context parallelism"] > 0
    assert shared.time.parts["data parallelism"] > 0  # nothing hides the sum of gradients
    sections = {"mesh": {"cp": 2, "dp_replicate": 2}, "parallel": ["compile", "context_parallel", "replicate"]}
    replicas = prediction(DENSE, **sections)
    assert 2 * replicas.memory.parameters == alone.memory.parameters  # replicate shards over cp


def test_methods_of_context_parallelism_differ_in_memory_and_time() -> None:
    alone = prediction(DENSE)
    found = {method: context_parallel(method) for method in ("all_gather", "ulysses", "ring", "hybrid")}
    # All keys and values of a sample: 8 heads of 128 features for 4 x 4,096 positions in 28 layers.
    gathered = 28 * 2 * 8 * 128 * 4 * 4096 * 2 * 3 / 4
    assert found["all_gather"].memory.activations - found["ring"].memory.activations == pytest.approx(gathered)
    # Kernels compute all of them; a ring merges its turns in addition.
    attention = [one.time.parts["attention"] for one in found.values()]
    assert attention == pytest.approx(attention[:1] * 4)
    merged = 28 * 4 * (10 * 2 + 10) * 16 * 128 * 4 * 1024 / Device.named("h200").elementwise_bytes
    more = found["ring"].time.parts["elementwise"] - alone.time.parts["elementwise"] / 4
    assert more == pytest.approx(merged, rel=0.05)
    times = {method: one.time.parts["context parallelism"] for method, one in found.items()}
    assert times["hybrid"] > times["ulysses"] / 2
    # Attention hides concurrent transfers, which are three times as large as with a gather.
    assert 0 < times["ring"] < 2 * times["all_gather"]


def test_what_travels_in_a_ring_shows_where_attention_is_too_short_for_it() -> None:
    slow = Device.named("h200").model_copy(update={"link": 1e9})
    fast, held_up = (replace(context_parallel("ring"), device=device) for device in (Device.named("h200"), slow))
    travels = 28 * (2 * 3 + 3 * 4 - 2) * 2 * 8 * 128 * 4 * 1024 / 1e9  # keys and values twice, wide gradients
    exposed = held_up.time.parts["context parallelism"]
    assert exposed > 10 * fast.time.parts["context parallelism"]
    assert exposed < 2 * travels


def listed_and_counted(job_values: dict[str, Any], strategy: str) -> tuple[dict[Any, float], dict[Any, float]]:
    """Bytes of a step by kind of collective and direction: those that explain lists, and those that are predicted."""
    from d9d_engine.job import Job

    job = Job.from_values(job_values)
    listed: dict[Any, float] = {}
    for entry in job.plan().collectives.entries:
        one = entry.collective
        if entry.source == strategy and one.kind != "receive":
            key = (one.kind, "backward" in one.purpose)
            listed[key] = listed.get(key, 0) + one.count * (one.bytes or 0)
    found = predict(job, job.registry, job.views(), Device.named("h200"))  # type: ignore[arg-type]
    (stage,) = found.workload.stages(found.layout, 1e9)
    counted: dict[Any, float] = {}
    for block in stage.blocks:
        ahead, behind = (*block.exchanges, *block.beside), (*block.backward_exchanges, *block.backward_beside)
        for backward, exchanges in ((False, ahead), (True, behind)):
            for exchange in exchanges:
                key = (exchange.operation, backward)
                size = found.layout.microbatches * block.count * exchange.count * exchange.size
                counted[key] = counted.get(key, 0) + size
    return listed, counted


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring", "hybrid"])
@pytest.mark.parametrize("pairs", [4, 2], ids=["heads", "fewer heads"])
def test_bytes_and_calls_between_ranks_of_cp_are_those_that_explain_lists(method: str, pairs: int) -> None:
    inner = {"head_ranks": 2} if method == "hybrid" else {}
    strategy = {"name": "context_parallel", "method": method, **inner}
    sections = {"mesh": {"cp": 4}, "parallel": [strategy], "batch": {"size": 4, "microbatch": 2}}
    listed, counted = listed_and_counted(values(SMALL | {"num_key_value_heads": pairs}, **sections), "context_parallel")
    assert counted
    assert counted == listed


@pytest.mark.thorough
@pytest.mark.parametrize("ep", [2, 4])
def test_bytes_between_ranks_of_ep_are_those_that_explain_lists(ep: int) -> None:
    sections = {"mesh": {"dp_shard": 4, "ep": ep}, "parallel": ["fsdp", "expert_parallel"], "batch": {"size": 8}}
    listed, counted = listed_and_counted(values(FEW_EXPERTS, **sections), "expert_parallel")
    assert {key for key in counted if key[0] == "all_to_all"} == {("all_to_all", False), ("all_to_all", True)}
    assert counted == pytest.approx(listed, rel=1e-3)


def test_tokens_that_travel_are_copied_more_often_than_those_that_stay() -> None:
    sections = {"mesh": {"dp_shard": 2}, "batch": {"size": 8}}
    stay = prediction(EXPERTS, parallel=["compile", "fsdp"], **sections)
    travel = prediction(
        EXPERTS, parallel=["compile", "fsdp", "expert_parallel"], **{**sections, "mesh": {"dp_shard": 2, "ep": 2}}
    )
    # Nearly all tokens have experts on both ranks, so that twice as many arrive as there are: 8 passes each way.
    passes = 8 * 2 * 8 * 4 * 4096 * 2048 * 2 / Device.named("h200").elementwise_bytes
    assert travel.time.parts["elementwise"] - stay.time.parts["elementwise"] == pytest.approx(passes, rel=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"mesh": {"tp": 2, "dp_shard": 2}, "parallel": ["tensor_parallel", "fsdp"]},
        {"mesh": {"pp": 2}, "pipeline": "1f1b", "batch": {"size": 4, "microbatch": 1}},
        {"mesh": {"cp": 2, "dp_replicate": 2}, "parallel": ["context_parallel", "replicate"]},
        {"precision": {"parameters": "float32"}},
    ],
    ids=["one", "tp, fsdp", "pp", "cp, replicate", "float32"],
)
def test_what_is_stored_is_what_the_plan_on_the_meta_device_counts(sections: dict[str, Any]) -> None:
    from d9d_engine.job import Job

    job = Job.from_values(values(SMALL, **sections))
    counted = job.plan().memory
    found = predict(job, job.registry, job.views(), Device.named("h200")).ranks[0]  # type: ignore[arg-type]
    # Whole tensors are rounded up where ranks do not divide them.
    assert found.parameters == pytest.approx(counted.parameters, rel=0.03)
    assert found.optimizer == pytest.approx(counted.optimizer, rel=0.03)
