"""The layout table and the seeded faults over NCCL."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.gpus(2)
def test_every_layout_computes_what_one_gpu_does(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = [layout for layout in table.LAYOUTS if layout.ranks <= torch.cuda.device_count()]
    rows = table.run(tmp_path / "corpus", layouts, device="cuda")
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()} x {torch.cuda.device_count()}\n{table.render(table.records(rows))}")
    assert [(dtype, count, v.layout, v.diverged) for dtype, count, v in rows if not v.passed] == []


@pytest.mark.gpus(2)
def test_experts_compute_what_one_gpu_does_wherever_they_are(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = [layout for layout in table.EXPERT_LAYOUTS if layout.ranks <= torch.cuda.device_count()]
    rows = table.run_experts(tmp_path / "corpus", "cuda", layouts)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()} x {torch.cuda.device_count()}\n{table.render(table.records(rows))}")
    assert [(dtype, count, v.layout, v.diverged) for dtype, count, v in rows if not v.passed] == []


@pytest.mark.gpus(2)
def test_pipelines_compute_what_one_gpu_does(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = torch.cuda.device_count()
    cases = [case for case in (*table.pipelines(), *table.special_pipelines()) if case.layout.ranks <= count]
    rows = table.run_pipelines(tmp_path / "corpus", cases, device="cuda")
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()} x {count}\n{table.render(table.merged(rows))}")
    assert [(count, v.layout, v.diverged) for _, count, v in rows if not v.passed] == []


@pytest.mark.gpus(2)
def test_with_a_capacity_experts_on_other_gpus_are_reached_without_waiting(table: ModuleType, tmp_path: Path) -> None:
    values = table.job(tmp_path / "corpus", "float32", "cuda", {**table.EXPERTS, "capacity": 2.0}) | {
        "metrics": ["router"],
        "batch": {"size": 12, "microbatch": 2},
    }
    parallel = [{"name": "fsdp", "compute_dtype": "bfloat16"}, "expert_parallel"]
    world = World(2, timeout=180.0, backend="cpu:gloo,cuda:nccl")
    losses = world.run(run_without_waiting, values, list(table.PLUGINS), parallel, {"dp_shard": 2, "ep": 2})
    assert losses[0] == losses[1]


#: A fault for good, in the processes of a world that are for nothing else.
SEEDED = """
import sys
import pytest
sys.path.append({folder!r})
from seeded_faults import {module}

def broken(job):
    {module}.{name}(job, pytest.MonkeyPatch())
"""


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("gradients.double_reduction", "replicate 2"),
        ("gradients.average_instead_of_sum", "fsdp 2"),
        ("data.shuffled_shard", "fsdp 2"),
    ],
)
def test_a_seeded_fault_is_caught(table: ModuleType, tmp_path: Path, fault: str, name: str) -> None:
    layouts = [layout for layout in table.LAYOUTS if layout.name == name]
    module, _, name = fault.partition(".")
    (tmp_path / "seeded.py").write_text(SEEDED.format(folder=str(Path(__file__).parent), module=module, name=name))
    seeded = f"{tmp_path / 'seeded.py'}:broken"
    ((_, _, verdict),) = table.run(tmp_path / "corpus", layouts, ["float32"], [3], seeded, "cuda")
    assert not verdict.passed


def run_without_waiting(values: dict[str, Any], plugins: list[str], parallel: list[Any], mesh: dict[str, int]) -> float:
    job = job_of(values | {"parallel": parallel, "mesh": mesh}, plugins)
    trainer = job.build(lambda _: None, topology_here(job))
    for step in range(2):  # lazy initialisation may wait
        trainer.step(step, trainer.prefetcher.next())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(2, 5):
            result = trainer.step(step, trainer.prefetcher.next())
            trainer.step.statistics.compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return result.loss.item()


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("parallel", "mesh", "pipeline"),
    [
        (["fsdp"], {"dp_shard": 2}, None),
        (["replicate", "compile"], {"dp_replicate": 2}, None),
        (["replicate", {"name": "compile", "cudagraphs": True}], {"dp_replicate": 2}, None),
        ([{"name": "replicate", "ignore": ["*norm*"]}], {"dp_replicate": 2}, None),
        ([{"name": "fsdp", "defer": "everything", "compute_dtype": "bfloat16"}, "compile"], {"dp_shard": 2}, None),
        ([], {"pp": 2}, "1f1b"),
        ([], {"pp": 2}, "zero_bubble_v"),
        ([], {"pp": 2}, "dual_pipe_v"),
    ],
    ids=[
        "fsdp", "replicate", "replicate and graphs", "replicate with buckets", "deferred, mixed and compiled", "1f1b",
        "zero_bubble_v", "dual_pipe_v",
    ],
)  # fmt: skip
def test_a_step_of_many_ranks_never_waits_for_the_gpu(
    table: ModuleType, tmp_path: Path, parallel: list[Any], mesh: dict[str, int], pipeline: str | None
) -> None:
    values = table.job(tmp_path / "corpus", "float32", "cuda", table.DEEP_DENSE) | {
        "metrics": ["perplexity"],
        "batch": {"size": 12, "microbatch": 2},
        "gradient_clipping": {"max_norm": 1.0},
        **({"pipeline": pipeline} if pipeline else {}),
    }
    world = World(2, timeout=180.0, backend="cpu:gloo,cuda:nccl")
    losses = world.run(run_without_waiting, values, list(table.PLUGINS), parallel, mesh)
    assert losses[0] == losses[1]
