"""Profiling of steps: which steps, the files, and the table of times by kind."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_engine.profiling.profiler import _rank_name
from d9d_engine.profiling.ranges import Ranges
from d9d_engine.profiling.summary import Span, kind_of, table, time_by_kind
from d9d_testing.toy.runs import assert_identical, final_tensors, noted, quiet

MakeJob = Callable[..., Job]
WINDOW = {"every": 6, "warmup": 1, "active": 2}


def traces(job: Job) -> dict[str, list[str]]:
    folder = job.run.directory / "profile"
    return (
        {step.name: sorted(path.name for path in step.iterdir()) for step in folder.iterdir()}
        if folder.exists()
        else {}
    )


def names(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


@pytest.mark.thorough
def test_the_last_steps_of_each_cycle_are_recorded_with_their_phases(job: MakeJob) -> None:
    made = job(profiling={**WINDOW, "record_shapes": True}, evaluation={"every": 6, "packs": 1, "data": "toy_data"})
    trainer, notes = noted(made)
    trainer.train()
    assert traces(made) == {"step-6": ["rank-0.json.gz"], "step-12": ["rank-0.json.gz"]}
    found = names(made.run.directory / "profile" / "step-12" / "rank-0.json.gz")
    for phase in ("data wait", "Backward stage 0 microbatch 1", "Reduce stage 0"):
        assert found.count(f"d9d/{phase}") == 2, phase
    for phase in ("gradient reduction", "clip", "optimizer"):
        assert found.count(f"d9d/{phase}") == 2, phase
    assert {"d9d/evaluation", "d9d/Forward stage 0 microbatch 1"} <= set(found)
    tables = [note for note in notes if note.startswith("profile of")]
    assert [note.partition(" (")[0] for note in tables] == ["profile of steps 5 to 6", "profile of steps 11 to 12"]
    assert all(word in tables[0] for word in ("matmul", "communication exposed", "optimizer", "idle", "ms per step"))


@pytest.mark.thorough
def test_cycles_are_counted_by_the_step_number_after_a_resume(job: MakeJob) -> None:
    made = job(profiling=WINDOW)
    trainer = quiet(made)
    list(trainer.steps(8))
    trainer.finish()
    assert list(traces(made)) == ["step-6"]
    quiet(made).train()
    assert sorted(traces(made)) == ["step-12", "step-6"]


def test_a_run_that_ends_inside_a_window_keeps_what_was_recorded(job: MakeJob) -> None:
    made = job(profiling=WINDOW)
    trainer, notes = noted(made)
    list(trainer.steps(5))
    trainer.finish()
    assert traces(made) == {"step-5": ["rank-0.json.gz"]}
    assert any(note.startswith("profile of step 5 (cpu, rank-0)") for note in notes)


@pytest.mark.thorough
def test_profiling_changes_no_number(job: MakeJob) -> None:
    plain, profiled = job("run.name=plain"), job("run.name=profiled", profiling={**WINDOW, "memory": True})
    quiet(plain).train()
    quiet(profiled).train()
    assert_identical(final_tensors(plain), final_tensors(profiled))
    assert traces(plain) == {}


def test_a_window_that_no_step_reaches_is_told_at_the_start(job: MakeJob) -> None:
    trainer, notes = noted(job(profiling={"every": 50}))
    list(trainer.steps(1))
    trainer.finish()
    assert any(
        "nothing will be recorded: the next recorded step is 48 of 12; lower profiling.every" in n for n in notes
    )


def test_a_window_that_is_longer_than_its_cycle_is_refused(job: MakeJob) -> None:
    with pytest.raises(JobError, match=r"warmup 3 and active 4 are 7 steps, more than the 6 of a cycle"):
        job(profiling={"every": 6, "warmup": 3, "active": 4})


def test_a_trace_that_cannot_be_written_costs_a_warning_and_not_the_run(job: MakeJob) -> None:
    made = job(profiling=WINDOW)
    made.run.directory.mkdir(parents=True)
    (made.run.directory / "profile").write_text("a file in the place of the directory")
    trainer, notes = noted(made)
    assert trainer.train().status == "finished"
    assert any("warning: profiling" in note for note in notes)


@pytest.mark.gpu
def test_on_a_gpu_the_table_is_of_its_kernels_and_memory_is_written(job: MakeJob) -> None:
    made = job("device=cuda", profiling={**WINDOW, "memory": True})
    trainer, notes = noted(made)
    trainer.train()
    assert traces(made)["step-12"] == ["rank-0.json.gz", "rank-0.memory.json.gz"]
    (shown, _) = [note for note in notes if note.startswith("profile of")]
    assert "(cuda" in shown
    assert re.search(r"elementwise, other +0\.\d*[1-9]", shown)
    with gzip.open(made.run.directory / "profile" / "step-12" / "rank-0.memory.json.gz", "rt") as file:
        assert json.load(file)["segments"]


def test_every_moment_counts_once_and_compute_hides_communication() -> None:
    spans = [
        Span("ProfilerStep#1", 0, 100),
        Span("aten::linear", 0, 30),
        Span("aten::addmm", 5, 25),
        Span("gloo:all_reduce", 20, 50, is_range=True),
        Span("aten::mul", 60, 70),
        Span("d9d/optimizer", 80, 95, is_range=True),
        Span("aten::add_", 82, 90),
        Span("d9d/clip", 0, 100, is_range=True),
    ]
    times, total = time_by_kind(spans, 1)
    expected = {"optimizer": 15, "attention": 0, "matmul": 30, "other": 10, "communication": 20, "idle": 25}
    assert (times, total) == (expected, 100)
    assert "matmul                       0.03 ms   30.0%" in table(times, total, 1, "profile")


def test_the_time_of_an_accelerator_is_that_of_its_kernels() -> None:
    spans = [
        Span("ProfilerStep#1", 0, 100),
        Span("aten::mm", 0, 100),
        Span("nvjet_tst_128x256", 50, 80, on_device=True),
        Span("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 70, 100, on_device=True),
        Span("flash_fwd_kernel", 110, 130, on_device=True),
        Span("d9d/optimizer", 140, 150, on_device=True, is_range=True),
        Span("multi_tensor_apply_kernel", 140, 150, on_device=True),
    ]
    times, total = time_by_kind(spans, 1)
    expected = {"optimizer": 10, "attention": 20, "matmul": 30, "other": 0, "communication": 20, "idle": 20}
    assert (times, total) == (expected, 100)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::add_", "other"),
        ("c10d::allreduce_", "communication"),
        ("autograd::engine::evaluate_function: AddmmBackward0", None),
        ("sm90_xmma_gemm_bf16bf16", "matmul"),
        ("void at::native::elementwise_kernel", "other"),
        ("triton_poi_fused__grouped_mm_mul_silu_9", "other"),
        ("triton_tem_fused_flex_attention_1", "attention"),
        ("Optimizer.step#AdamW.step", "optimizer"),
    ],
)
def test_kinds_are_known_by_the_names_of_operations_and_kernels(name: str, kind: str | None) -> None:
    assert kind_of(Span(name, 0, 1)) == kind


def test_a_range_is_one_shared_object_while_nothing_records() -> None:
    ranges = Ranges()
    assert ranges("clip") is ranges("optimizer")


def test_traces_are_named_by_the_coordinate() -> None:
    sizes: dict[str, Any] = {**Topology().sizes, "dp_shard": 2, "pp": 2}
    assert _rank_name(Topology(sizes=sizes, rank=3, world_size=4)) == "rank-3-pp1-dp_shard1"


@pytest.mark.thorough
@pytest.mark.parametrize("stacks", [False, True])
def test_a_trace_has_lines_of_python_code_where_the_job_asks_for_them(job: MakeJob, stacks: bool) -> None:
    made = job(profiling={**WINDOW, "with_stack": stacks})
    quiet(made).train()
    found = names(made.run.directory / "profile" / "step-12" / "rank-0.json.gz")
    assert any(re.search(r"trainer\.py\(\d+\): ", name) for name in found) == stacks
