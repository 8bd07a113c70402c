"""Predictions agree with what was measured on an H200, and plans are jobs that ``d9d check`` accepts."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core.errors import D9dError, JobError, TrainingError
from d9d_core.job import JobFile
from d9d_engine.planner.check import predicted, ways_out
from d9d_engine.planner.device import Device
from d9d_engine.planner.layout import Layout
from d9d_engine.planner.prediction import Prediction, predict
from d9d_engine.planner.search import search
from d9d_engine.planner.workload import Workload
from typer.testing import CliRunner

GIB = 2**30
DENSE = {
    "name": "qwen3", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_positions": 4096,
}  # fmt: skip
EXPERTS = {
    "name": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "num_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "experts_per_token": 8,
    "moe_intermediate_size": 768, "max_positions": 4096,
}  # fmt: skip
SMALL = {
    "name": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
}  # fmt: skip
FEW_EXPERTS = {
    "name": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "num_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 32,
    "max_positions": 64,
}  # fmt: skip


def values(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "steps": 10,
        "model": model,
        "task": "causal_lm",
        "data": {"name": "text", "sources": ["x"], "sequence_length": model.get("max_positions", 4096)},
        "batch": {"size": 4},
        "parallel": ["compile"],
        "precision": {"parameters": "bfloat16"},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        **sections,
    }


def prediction(model: dict[str, Any], device: str = "h200", **sections: Any) -> Prediction:
    job = JobFile.from_values(values(model, **sections))
    return predict(job, job.registry, job.views(), Device.named(device))


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit status and output of ``d9d``."""
    from d9d_core.cli.app import app

    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, D9dError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


# --- against measurements: one H200, 4 x 4,096 tokens, compiled, parameters and states in bfloat16 -------------------


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
    assert documents.workload.notes == ["samples have up to 2,048 positions; counted as if all had"]


def test_a_plan_leaves_out_layouts_that_cannot_split_the_samples_of_an_evaluation() -> None:
    evaluation = {"every": 5, "data": {"name": "text", "sources": ["y"], "sequence_length": 4098}}
    job = JobFile.from_values(values(DENSE | {"max_positions": 8192}, evaluation=evaluation, batch={"size": 8}))
    found = search(Workload(job, job.registry, job.views()), 8, Device.named("h200"))
    assert {(one.layout.mesh.tp, one.layout.mesh.cp) for one in found.ranked} == {(1, 1), (2, 1)}
    with pytest.raises(JobError, match="those of evaluation are multiples of 4098; use other sizes of the mesh"):
        prediction(DENSE, evaluation=evaluation, mesh={"cp": 2}, parallel=["context_parallel"]).memory  # noqa: B018


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


def test_sharding_copies_what_changes_its_format_or_has_replicas() -> None:
    fast, slow = (Device.named("h100").model_copy(update={"copy_bytes": rate}) for rate in (3e12, 1e12))

    def copied(strategy: dict[str, Any], **mesh: int) -> float:
        job = JobFile.from_values(values(SMALL, mesh=mesh, parallel=[strategy]))
        times = [
            predict(job, job.registry, job.views(), rates).time.parts["data parallelism"] for rates in (fast, slow)
        ]
        return times[1] - times[0]

    plain = copied({"name": "fsdp"}, dp_shard=2)
    assert plain <= 0  # what is computed is slower, too, and hides more
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
    monkeypatch.setattr("d9d_engine.planner.step_time.steady", lambda ranks: 24 * ranks)
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
    # Kernels compute all of them; what a ring does besides is to merge its turns.
    attention = [one.time.parts["attention"] for one in found.values()]
    assert attention == pytest.approx(attention[:1] * 4)
    merged = 28 * 4 * (10 * 2 + 10) * 16 * 128 * 4 * 1024 / Device.named("h200").elementwise_bytes
    more = found["ring"].time.parts["elementwise"] - alone.time.parts["elementwise"] / 4
    assert more == pytest.approx(merged, rel=0.05)
    times = {method: one.time.parts["context parallelism"] for method, one in found.items()}
    assert times["hybrid"] > times["ulysses"] / 2
    # Attention hides what travels beside it, which is three times as much as where it is gathered.
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
    from d9d_engine.api import Job

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


@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring", "hybrid"])
@pytest.mark.parametrize("pairs", [4, 2], ids=["heads", "fewer heads"])
def test_bytes_and_calls_between_ranks_of_cp_are_those_that_explain_lists(method: str, pairs: int) -> None:
    inner = {"head_ranks": 2} if method == "hybrid" else {}
    strategy = {"name": "context_parallel", "method": method, **inner}
    sections = {"mesh": {"cp": 4}, "parallel": [strategy], "batch": {"size": 4, "microbatch": 2}}
    listed, counted = listed_and_counted(values(SMALL | {"num_key_value_heads": pairs}, **sections), "context_parallel")
    assert counted
    assert counted == listed


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


def test_a_plan_tries_another_method_of_context_parallelism() -> None:
    job = JobFile.from_values(values(DENSE, mesh={"cp": 2}, parallel=["compile", "context_parallel"]))
    found = search(Workload(job, job.registry, job.views()), 2, Device.named("h200"))
    methods = {
        strategy.method  # type: ignore[attr-defined]
        for one in found.ranked
        for strategy in one.layout.parallel
        if strategy.selector == "context_parallel"
    }
    assert methods == {"all_gather", "ulysses"}


def test_a_plan_has_no_two_layouts_that_read_or_cost_the_same() -> None:
    job = JobFile.from_values(values(DENSE, parallel=["compile"], batch={"size": 32}))
    found = search(Workload(job, job.registry, job.views()), 4, Device.named("h200"))
    lines = [(str(one.layout), one.layout.microbatch, one.layout.pipeline) for one in found.ranked]
    assert len(set(map(str, lines))) == len(lines)
    shown = {text for text, _, _ in lines}
    # Whether replicas wait for the last microbatch makes no difference where they are reduced in place.
    assert [text for text in shown if text.startswith("dp_replicate=4, ")] == ["dp_replicate=4, replicate"]
    assert {"dp_shard=4, fsdp", "dp_shard=4, fsdp(defer=everything)"} <= shown


# --- d9d check --------------------------------------------------------------------------------------------------------


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
    from d9d_engine.api import Job

    job = Job.from_values(values(SMALL, **sections))
    counted = job.plan().memory
    found = predict(job, job.registry, job.views(), Device.named("h200")).ranks[0]  # type: ignore[arg-type]
    # Whole tensors are rounded up where ranks do not divide them.
    assert found.parameters == pytest.approx(counted.parameters, rel=0.03)
    assert found.optimizer == pytest.approx(counted.optimizer, rel=0.03)


@pytest.mark.parametrize("processes", ["2", None], ids=["two", "unknown"])
def test_tensor_parallelism_over_machines_is_warned_of_once_with_its_price(
    processes: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    path, wide = tmp_path / "job.yaml", 4 if processes else 16
    path.write_text(
        yaml.safe_dump(values(SMALL | heads, mesh={"tp": wide}, parallel=["tensor_parallel"], device="cpu"))
    )
    status, output = invoke("check", str(path))
    assert status == 0, output
    text = " ".join(output.split())
    assert text.count("warning") == 1
    assert f"mesh.tp is {wide}, wider than the {processes or 8} processes of a node: " in text
    assert re.search(r"they are predicted to take \d+% of a step of [\d.e-]+ s; use a tp that divides", text)
    assert "several times as long" not in text


def test_tensor_parallelism_within_a_machine_has_no_price() -> None:
    job = JobFile.from_values(values(DENSE, mesh={"tp": 8}, parallel=["compile", "tensor_parallel"]))
    assert predicted(job, None).price is None
    assert predicted(job, None, node=4).price is not None


def test_a_job_that_does_not_fit_is_told_three_ways_out_that_do() -> None:
    job = JobFile.from_values(values(DENSE))
    with pytest.raises(JobError, match="the cheapest ways out") as refused:
        predicted(job, 30 * GIB)
    text = str(refused.value)
    assert "this job needs 4" in text
    assert "which has 30.0 GiB" in text
    assert re.findall(r"^(\d)\. [\d.]+ s a step", text, re.MULTILINE) == ["1", "2", "3"]
    device = Device.named("h200").model_copy(update={"memory_gib": 30.0})
    ways = ways_out(Prediction(Workload(job, job.registry, job.views()), Layout.of(job), device))
    for way in ways:
        way.layout.on(job).use(job.registry).check(way.layout.mesh.world_size)
        assert way.fits


def test_where_no_smaller_microbatch_helps_more_devices_do() -> None:
    job = JobFile.from_values(values(DENSE, batch={"size": 8}))
    device = Device.named("h200").model_copy(update={"memory_gib": 14.0})
    ways = ways_out(Prediction(Workload(job, job.registry, job.views()), Layout.of(job), device))
    assert ways
    assert all(way.layout.mesh.world_size > 1 and way.fits for way in ways)


def test_a_job_that_fits_is_described(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values(SMALL)))
    status, output = invoke("check", str(path), "--memory", "80GiB")
    assert status == 0
    assert "predicted" in output
    assert "GiB (" in output


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values(SMALL)))
    assert invoke("check", str(path), "--memory", "80")[1].startswith("--memory: '80' is no size")


# --- d9d plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_written_as_a_job_that_check_accepts(tmp_path: Path) -> None:
    path, out = tmp_path / "job.yaml", tmp_path / "planned.yaml"
    path.write_text(yaml.safe_dump(values(SMALL, batch={"size": 16})))
    status, output = invoke("plan", str(path), "--gpus", "8", "--memory", "80GiB", "--top", "3", "--write", str(out))
    assert status == 0, output
    assert "bound by" in output
    written = JobFile.load(out)
    assert written.mesh.world_size == 8
    assert invoke("check", str(out), "--memory", "80GiB")[0] == 0
    assert invoke("plan", str(path), "--gpus", "8", "--write", str(out))[1].endswith("name another file, or remove it")


def test_layouts_are_ranked_and_the_pareto_front_is_faster_or_smaller_at_each_point() -> None:
    job = JobFile.from_values(values(EXPERTS, batch={"size": 64}))
    found = search(Workload(job, job.registry, job.views()), 8, Device.named("h200"))
    times = [one.time.total for one in found.ranked]
    assert times == sorted(times)
    sizes = [one.memory.needed for one in found.pareto]
    assert sizes == sorted(sizes, reverse=True)
    assert all(one.fits and one.layout.mesh.world_size == 8 for one in found.ranked)


def test_a_plan_for_too_few_devices_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values({"name": "qwen3_moe", "preset": "235b-a22b"}, batch={"size": 8})))
    status, output = invoke("plan", str(path), "--gpus", "2", "--memory", "80GiB")
    assert status == 2
    assert "no layout on 2 devices fits into 80.0 GiB" in output


def test_a_batch_that_no_layout_divides_is_said(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values(SMALL, batch={"size": 1})))
    assert "no layout on 7 devices is legal" in invoke("plan", str(path), "--gpus", "7")[1]


def test_the_device_at_hand_is_measured_into_a_file_that_plans_use(tmp_path: Path) -> None:
    path, rates = tmp_path / "job.yaml", tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values(SMALL, device="cpu")))
    status, output = invoke("plan", str(path), "--gpus", "1", "--calibrate", str(rates))
    assert status == 0, output
    measured, known = Device.named(str(rates)), Device.named("h200")
    assert 0 < measured.product < known.product
    assert 0 < measured.copy_bytes < known.copy_bytes
    assert measured.grouped_product / measured.product == pytest.approx(known.grouped_product / known.product)
    assert measured.network == known.network
    assert invoke("plan", str(path), "--gpus", "1", "--gpu", str(rates))[0] == 0
    assert "exists" in invoke("plan", str(path), "--calibrate", str(rates))[1]


@pytest.mark.thorough
def test_collectives_between_processes_are_measured() -> None:
    from d9d_engine.planner.links.measure import measured_link

    found = measured_link("cpu", 2)
    assert set(found) == {"link", "link_latency"}
    assert 1e6 < found["link"] < Device.named("h200").link
    assert 1e-6 < found["link_latency"] < 1
    assert Device.named("h200").model_copy(update=found).link == found["link"]


@pytest.mark.thorough
def test_collectives_that_fail_are_an_error_with_what_the_process_said() -> None:
    from d9d_engine.planner.links.measure import measured_link

    with pytest.raises(TrainingError, match="between 2 devices could not be measured: process [01]: .*nothing-like-it"):
        measured_link("nothing-like-it", 2)


# --- fine-tuning ------------------------------------------------------------------------------------------------------

LORA = {"name": "lora", "r": 4}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora on everything": LORA | {"targets": ["all-linear", "embedding", "heads.*"], "exclude": ["layers.1.*"]},
    "dora": {"name": "dora", "r": 4, "targets": ["q_proj", "down_proj"]},
    "ia3": {"name": "ia3"},
    "full_tune": {"name": "full_tune", "match": ["layers.3.*", "norm", "heads.*"]},
    "stack": {"name": "stack", "methods": [LORA, {"name": "full_tune", "match": ["heads.*"]}]},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [SMALL, FEW_EXPERTS], ids=["dense", "experts"])
def test_a_fine_tuned_model_stores_what_the_plan_counts(method: str, model: dict[str, Any]) -> None:
    peft = METHODS[method]
    if model is FEW_EXPERTS:
        banks = {"ia3": {"feedforward": []}, "dora": {"targets": ["q_proj", "o_proj"]}}
        peft = peft | banks.get(method, {"targets": ["all-linear", "*.experts.*"]} if method == "lora" else {})
    compare_with_plan(values(model, peft=peft, precision={"parameters": "bfloat16"}))


@pytest.mark.parametrize("method", ["lora", "dora", "full_tune"])
@pytest.mark.parametrize("mesh", [{"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}], ids=["tp, fsdp", "pp, fsdp"])
def test_layouts_share_what_fine_tuning_adds(method: str, mesh: dict[str, int]) -> None:
    strategies = ["fsdp", *(["tensor_parallel"] if "tp" in mesh else [])]
    sections = {"pipeline": "1f1b", "batch": {"size": 8, "microbatch": 1}} if "pp" in mesh else {}
    compare_with_plan(values(SMALL, peft=METHODS[method], mesh=mesh, parallel=strategies, **sections))


def compare_with_plan(job_values: dict[str, Any]) -> None:
    """Compare what the first rank stores by the prediction with the tensors of the plan on the meta device."""
    from d9d_engine.api import Job

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
    # A third of the products of linear layers is left out, and small ones are added; attention is what it was.
    assert 2 / 3 < lora.time.parts["products"] / whole.time.parts["products"] < 0.95
    assert lora.time.parts["attention"] == whole.time.parts["attention"]
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
    from d9d_core.plugin import Registry, hookimpl

    class Undescribed:
        D9D_API = 1

        @hookimpl
        def d9d_peft_methods(self) -> Any:
            return [replaced(spec, cost=None) for spec in d9d_peft.plugin.d9d_peft_methods()]

    plugins = [d9d_nn.plugin, d9d_data.plugin, d9d_optim.plugin, d9d_parallel.plugin, d9d_qwen3.plugin, Undescribed()]
    job = JobFile.from_values(values(SMALL, peft=LORA), registry=Registry.of(*plugins))
    outlook = predicted(job, None)
    assert outlook.lines[0].startswith("not predicted: peft: ")
    assert "has no cost description (PeftSpec.cost)" in outlook.lines[0]
    with pytest.raises(JobError, match="PeftSpec"):
        predicted(job, 80 * GIB)


@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [("muon", {}), ("lion", {}), ("schedule_free", {}), ("sgd", {}), ("muon", {"dp_shard": 2})],
    ids=["muon", "lion", "schedule_free", "sgd", "muon, fsdp"],
)
def test_states_of_every_optimizer_are_those_of_the_plan(optimizer: str, mesh: dict[str, int]) -> None:
    parallel = ["fsdp"] if mesh else []
    compare_with_plan(values(SMALL, optimizer={"name": optimizer, "lr": 1e-4}, mesh=mesh, parallel=parallel))


def test_muon_takes_less_memory_and_more_time_than_adamw() -> None:
    adamw, muon = prediction(DENSE), prediction(DENSE, optimizer={"name": "muon", "lr": 1e-4})
    assert muon.memory.optimizer < 0.75 * adamw.memory.optimizer
    assert muon.time.parts["optimizer"] > 10 * adamw.time.parts["optimizer"]
    shared = prediction(
        DENSE, optimizer={"name": "muon", "lr": 1e-4}, mesh={"dp_shard": 4}, parallel=["compile", "fsdp"]
    )
    assert shared.time.parts["optimizer"] < muon.time.parts["optimizer"] / 3


@pytest.mark.thorough
def test_a_large_model_is_planned_for_4096_devices_in_a_minute(tmp_path: Path) -> None:
    path, out = tmp_path / "job.yaml", tmp_path / "planned.yaml"
    path.write_text(yaml.safe_dump(values({"name": "qwen3_moe", "preset": "235b-a22b"}, batch={"size": 4096})))
    start = time.process_time()
    assert invoke("plan", str(path), "--gpus", "4096", "--memory", "141GB", "--write", str(out))[0] == 0
    assert time.process_time() - start < 60
    assert invoke("check", str(out), "--world-size", "4096", "--memory", "141GB")[0] == 0
