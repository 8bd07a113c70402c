"""Plans are jobs that ``d9d check`` accepts, and jobs that do not fit are told what would."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core.errors import JobError, TrainingError
from d9d_core.job import JobFile
from d9d_planner.check import predicted, ways_out
from d9d_planner.device import Device
from d9d_planner.layout import Layout
from d9d_planner.prediction import Prediction
from d9d_planner.search import layouts, search
from d9d_planner.workload import Workload

from tests.planned_jobs import DENSE, EXPERTS, GIB, SMALL, invoke, prediction, values

# --- d9d check --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("processes", ["2", None], ids=["two", "unknown"])
def test_tensor_parallelism_over_machines_is_warned_of_and_priced(
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
    assert re.search(rf"tp {wide} over nodes of {processes or 8} devices takes \d+% of a step of [\d.e-]+ s", text)
    assert text.count("warning") == (1 if processes else 0)  # here the size of a node is unknown
    assert (f"mesh.tp is {wide}, wider than the {processes} processes of a node: " in text) == bool(processes)


def test_tensor_parallelism_within_a_machine_has_no_price() -> None:
    job = JobFile.from_values(values(DENSE, mesh={"tp": 8}, parallel=["compile", "tensor_parallel"]))
    assert "over nodes of" not in " ".join(predicted(job, None))
    assert "over nodes of 4 devices" in " ".join(predicted(job, None, node=4))


def test_a_job_that_does_not_fit_is_told_three_ways_out_that_do() -> None:
    job = JobFile.from_values(values(DENSE))
    with pytest.raises(JobError, match="the cheapest alternatives") as refused:
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


def test_kept_attention_takes_the_memory_of_its_outputs_and_saves_its_second_forward() -> None:
    def checkpointed(**settings: Any) -> Prediction:
        few_words = DENSE | {"vocab_size": 512}  # so that memory peaks in the backward of the last block
        strategies = ["compile", {"name": "activation_checkpointing", **settings}]
        return prediction(few_words, batch={"size": 32}, parallel=strategies)

    all_again, kept = checkpointed(), checkpointed(save=["attention"])
    # Bfloat16 of 32 x 4096 positions with 16 heads of 128 features, and a float32 sum for each head, in 28 layers.
    outputs = 28 * 32 * 4096 * 16 * (2 * 128 + 4)
    of_block = outputs / 28  # at the peak, the second forward of a block makes no other
    assert kept.memory.activations - all_again.memory.activations == pytest.approx(outputs)
    assert all_again.memory.workspace - kept.memory.workspace == pytest.approx(of_block)
    forward = all_again.time.parts["attention"] / 3.5  # a backward takes 2.5 of them
    assert all_again.time.parts["recomputation"] - kept.time.parts["recomputation"] == pytest.approx(forward)
    assert kept.time.parts["attention"] == all_again.time.parts["attention"]


@pytest.mark.thorough
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
    assert invoke("check", str(path), "--memory", "80")[1].startswith("--memory: '80' is not a size")


# --- d9d plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_layouts_are_ranked_and_the_pareto_front_is_faster_or_smaller_at_each_point() -> None:
    job = JobFile.from_values(values(EXPERTS, batch={"size": 64}))
    found = search(Workload(job, job.registry, job.views()), 8, Device.named("h200"))
    times = [one.time.total for one in found.ranked]
    assert times == sorted(times)
    sizes = [one.memory.needed for one in found.pareto]
    assert sizes == sorted(sizes, reverse=True)
    assert all(one.fits and one.layout.mesh.world_size == 8 for one in found.ranked)


@pytest.mark.thorough
def test_a_plan_leaves_out_layouts_that_cannot_split_the_samples_of_an_evaluation() -> None:
    evaluation = {"every": 5, "data": {"name": "text", "sources": ["y"], "sequence_length": 4098}}
    job = JobFile.from_values(values(DENSE | {"max_positions": 8192}, evaluation=evaluation, batch={"size": 8}))
    found = search(Workload(job, job.registry, job.views()), 8, Device.named("h200"))
    assert {(one.layout.mesh.tp, one.layout.mesh.cp) for one in found.ranked} == {(1, 1), (2, 1)}
    with pytest.raises(JobError, match="evaluation has multiples of 4098; use other sizes of the mesh"):
        prediction(DENSE, evaluation=evaluation, mesh={"cp": 2}, parallel=["context_parallel"]).memory  # noqa: B018


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


@pytest.mark.thorough
def test_a_plan_has_no_two_layouts_that_read_or_cost_the_same() -> None:
    job = JobFile.from_values(values(DENSE, parallel=["compile"], batch={"size": 32}))
    found = search(Workload(job, job.registry, job.views()), 4, Device.named("h200"))
    lines = [(str(one.layout), one.layout.microbatch, one.layout.pipeline) for one in found.ranked]
    assert len(set(map(str, lines))) == len(lines)
    shown = {text for text, _, _ in lines}
    # Whether replicas wait for the last microbatch makes no difference where they are reduced in place.
    assert [text for text in shown if text.startswith("dp_replicate=4, ")] == ["dp_replicate=4, replicate"]
    assert {"dp_shard=4, fsdp", "dp_shard=4, fsdp(defer=everything)"} <= shown


def test_a_plan_for_too_few_devices_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values({"name": "qwen3_moe", "preset": "235b-a22b"}, batch={"size": 8})))
    status, output = invoke("plan", str(path), "--gpus", "2", "--memory", "80GiB")
    assert status == 2
    assert "no layout on 2 devices fits into 80.0 GiB" in output


def test_a_batch_that_no_layout_divides_is_said(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values(SMALL, batch={"size": 1})))
    assert "no layout on 7 devices is valid" in invoke("plan", str(path), "--gpus", "7")[1]


@pytest.mark.thorough
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


@pytest.mark.full
def test_collectives_between_processes_are_measured() -> None:
    from d9d_planner.links.measure import measured_link

    found = measured_link("cpu", 2)
    assert set(found) == {"link", "link_latency"}
    assert 1e6 < found["link"] < Device.named("h200").link
    assert 1e-6 < found["link_latency"] < 1
    assert Device.named("h200").model_copy(update=found).link == found["link"]


@pytest.mark.full
def test_collectives_that_fail_are_an_error_with_what_the_process_said() -> None:
    from d9d_planner.links.measure import measured_link

    with pytest.raises(TrainingError, match="between 2 devices could not be measured: process [01]: .*nothing-like-it"):
        measured_link("nothing-like-it", 2)


@pytest.mark.full
def test_a_large_model_is_planned_for_4096_devices_in_a_minute(tmp_path: Path) -> None:
    path, out = tmp_path / "job.yaml", tmp_path / "planned.yaml"
    path.write_text(yaml.safe_dump(values({"name": "qwen3_moe", "preset": "235b-a22b"}, batch={"size": 4096})))
    start = time.process_time()
    assert invoke("plan", str(path), "--gpus", "4096", "--memory", "141GB", "--write", str(out))[0] == 0
    assert time.process_time() - start < 60
    assert invoke("check", str(out), "--world-size", "4096", "--memory", "141GB")[0] == 0


# --- replicas that take their own steps -------------------------------------------------------------------------------


def test_replicas_of_their_own_steps_are_kept_by_the_search_and_meet_for_less_than_gradients_cost() -> None:
    own: dict[str, Any] = {"mesh": {"dp_replicate": 4, "dp_shard": 2}, "batch": {"size": 16}}
    job = JobFile.from_values(values(DENSE, parallel=["fsdp", {"name": "diloco", "period": 50}], **own))
    found = list(layouts(Workload(job, job.registry, job.views()), 16, 4))
    for one in found:
        assert one.mesh.dp_replicate == 4
        assert [config.selector for config in one.parallel].count("diloco") == 1
        assert ("fsdp" in [config.selector for config in one.parallel]) == (one.mesh.dp_shard > 1)
    assert {one.mesh.dp_shard for one in found} >= {1, 4}
    plain = JobFile.from_values(values(DENSE, parallel=["hsdp"], **own))
    others = layouts(Workload(plain, plain.registry, plain.views()), 16, 4)
    names = {config.selector for one in others for config in one.parallel}
    assert not names & {"diloco", "local_sgd"}

    apart, rare, each = (
        prediction(DENSE, parallel=["fsdp", {"name": name, "period": period}], **own)
        for name, period in (("diloco", 50), ("local_sgd", 50), ("local_sgd", 1))
    )
    together = prediction(DENSE, parallel=["hsdp"], **own)
    assert rare.time.total < together.time.total
    assert rare.time.total < each.time.total
    assert apart.time.total == rare.time.total
    assert apart.memory.optimizer > rare.memory.optimizer == together.memory.optimizer
