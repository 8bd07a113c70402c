"""Jobs that run Triton's kernels, interpreted on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import BuildError
from d9d_engine.job import Job
from d9d_testing.world import World
from d9d_triton.linear_cross_entropy import shares

Write = Callable[..., Path]
D9d = Callable[..., tuple[int, str, str]]
STOCHASTIC = {"optimizer": {"name": "stochastic_adamw", "lr": 0.01}, "precision": {"parameters": "bfloat16"}}

#: Interpreted, each token of the loss takes milliseconds.
FEW_TOKENS = {"steps": 3, "batch": {"size": 1, "microbatch": 1}, "metrics": []}
COMPILED = ["activation_checkpointing", {"name": "compile", "backend": "aot_eager"}]

#: Of joint projections: as written, compiled, and with weights that autocast casts.
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"parallel": COMPILED},
    {"precision": {"autocast": "bfloat16"}, "parallel": COMPILED},
)
#: Kernels of a layer whose projections are unchanged.
LAYERS = ("add_rms_norm", "attention_inputs", "swiglu")


def losses(path: Path) -> list[float]:
    Job.load(path).build(lambda _: None).train()
    run = json.loads(path.read_text())["run"]
    lines = (Path(run["dir"]) / run["name"] / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines)]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")  # Dynamo's
@pytest.mark.parametrize(
    ("op", "backend", "sections"),
    [
        ("adamw", "triton", {}),
        ("stochastic_adamw", "triton", STOCHASTIC),
        ("add_rms_norm", "triton", FEW_TOKENS),
        ("add_rms_norm", "triton", {**FEW_TOKENS, "parallel": COMPILED}),
        *((op, "triton", {**FEW_TOKENS, **sections}) for op in ("attention_inputs", "swiglu") for sections in JOBS),
        ("linear_cross_entropy", "triton", FEW_TOKENS),
        ("linear_cross_entropy", "triton_sum", FEW_TOKENS),
        ("linear_cross_entropy", "triton_sum_narrow", FEW_TOKENS),
        ("linear_cross_entropy", "triton_words", FEW_TOKENS),
    ],
)
def test_a_job_trains_with_the_kernel_that_it_names_as_with_the_reference(
    small_job: Write, op: str, backend: str, sections: dict[str, Any]
) -> None:
    common = {"export": False, "logging": {"every": 1}, **sections}
    found = losses(small_job("fused", kernels={op: backend}, **common))
    expected = losses(small_job("plain", kernels={op: "reference"}, **common))
    assert len(found) == sections.get("steps", 6)
    assert found == pytest.approx(expected, rel=2e-3)


def calls_of_kernels(path: str) -> int:
    """Train a job together with the other ranks, and count the passes that compute statistics by kernels."""
    job, real, count = Job.load(path), shares.include_chunk, 0

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, job.joined() as topology:
        patch.setattr(shares, "include_chunk", counted)
        job.build(lambda _: None, topology).train()
    return count


@pytest.mark.full
def test_ranks_that_share_the_words_train_with_the_kernel_as_with_the_reference(small_job: Write) -> None:
    common = {
        "steps": 3, "batch": {"size": 1, "microbatch": 1}, "mesh": {"tp": 2}, "parallel": ["tensor_parallel"],
        "metrics": [{"name": "token_accuracy", "top": [5]}], "logging": {"every": 1}, "export": False,
    }  # fmt: skip
    found = {}
    for backend in ("triton", "reference"):
        path = small_job(backend, kernels={"vocabulary_parallel_cross_entropy": backend}, **common)
        assert World(2, timeout=240).run(calls_of_kernels, str(path)) == [3 if backend == "triton" else 0] * 2
        lines = list(map(json.loads, (path.parent / "runs" / backend / "metrics.jsonl").read_text().splitlines()))
        found[backend] = [[line[name] for line in lines] for name in ("loss", "grad_norm", "token_accuracy_top_5")]
    assert len(found["triton"][0]) == 3
    for of_kernel, of_reference in zip(found["triton"], found["reference"], strict=True):
        assert of_kernel == pytest.approx(of_reference, rel=2e-3)


def train(path: str) -> None:
    job = Job.load(path)
    with job.joined() as topology:
        job.build(lambda _: None, topology).train()


@pytest.mark.full
@pytest.mark.parametrize(
    ("ops", "layout"),
    [
        (LAYERS[:1], {"mesh": {"tp": 2}, "parallel": ["tensor_parallel", *COMPILED]}),
        (LAYERS, {"mesh": {"dp_shard": 2}, "parallel": ["fsdp", *COMPILED]}),
        (LAYERS, {"mesh": {"dp_replicate": 2}, "parallel": ["replicate", *COMPILED]}),
        (LAYERS, {"mesh": {"pp": 2}, "pipeline": "zb1p"}),
    ],
    ids=["tensor_parallel", "fsdp", "replicate", "zb1p"],
)
def test_ranks_train_with_the_kernels_of_layers(small_job: Write, ops: tuple[str, ...], layout: dict[str, Any]) -> None:
    common = {"steps": 3, "batch": {"size": 2, "microbatch": 1}, "metrics": [], "logging": {"every": 1}, **layout}
    found = {}
    for backend in ("triton", "reference"):
        path = small_job(backend, kernels=dict.fromkeys(ops, backend), export=False, **common)
        World(2, timeout=240).run(train, str(path))
        lines = list(map(json.loads, (path.parent / "runs" / backend / "metrics.jsonl").read_text().splitlines()))
        found[backend] = [line[name] for line in lines for name in ("loss", "grad_norm")]
    assert len(found["triton"]) == 6
    assert found["triton"] == pytest.approx(found["reference"], rel=2e-3)


@pytest.mark.thorough
def test_explain_shows_the_kernel_of_ranks_that_share_the_words(small_job: Write, d9d: D9d) -> None:
    status, out, _ = d9d("explain", str(small_job(device="cuda", mesh={"tp": 2}, parallel=["tensor_parallel"])))
    assert status == 0
    lines = [line.strip() for line in out.splitlines()]
    (at,) = (place for place, line in enumerate(lines) if line.startswith("vocabulary_parallel_cross_entropy: "))
    assert lines[at] == (
        "vocabulary_parallel_cross_entropy: triton (d9d-triton 0.1.0) at heads.causal_lm.linear_cross_entropy"
    )
    assert any(line.startswith("triton accepts, priority 20: reads each logit of the rank") for line in lines[at:])


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_without_the_head_take_a_job_that_names_the_kernel(small_job: Write, d9d: D9d, rank: int) -> None:
    kernels = {"vocabulary_parallel_cross_entropy": "reference"}
    layout = {"mesh": {"pp": 2, "tp": 2}, "pipeline": "1f1b", "parallel": ["tensor_parallel"]}
    status, out, err = d9d("explain", str(small_job(device="cuda", kernels=kernels, **layout)), "--rank", str(rank))
    assert status == 0, err
    assert ("vocabulary_parallel_cross_entropy: reference, asked for by" in out) == (rank == 3)
    layout |= {"mesh": {"pp": 2}, "parallel": []}
    status, _, err = d9d("explain", str(small_job(device="cuda", kernels=kernels, **layout)), "--rank", str(rank // 2))
    assert (status, "the job calls no op 'vocabulary_parallel_cross_entropy'" in " ".join(err.split())) == (
        (2, True) if rank == 3 else (0, False)
    )


def test_explain_shows_the_kernel_of_the_optimizer_and_why(small_job: Write, d9d: D9d) -> None:
    status, out, _ = d9d("explain", str(small_job(kernels={"adamw": "triton"})))
    assert status == 0
    assert "adamw: triton (d9d-triton 0.1.0), asked for by kernels.adamw, at optimizer.step" in out


def test_on_a_cpu_nothing_is_interpreted_unasked(small_job: Write, d9d: D9d) -> None:
    status, out, _ = d9d("explain", str(small_job()))
    assert status == 0
    assert "adamw: reference at optimizer.step" in out


def test_a_kernel_of_an_optimizer_that_the_job_does_not_have_is_an_error(small_job: Write) -> None:
    notes: list[str] = []
    with pytest.raises(
        BuildError,
        match="kernels.stochastic_adamw: the job calls no op 'stochastic_adamw'; remove it, or name an op of the job",
    ):
        Job.load(small_job(kernels={"stochastic_adamw": "triton"})).build(notes.append)
    assert notes == []  # before data is prepared and weights are read


@pytest.mark.thorough
def test_explain_says_why_compiled_blocks_leave_the_kernel_out(small_job: Write, d9d: D9d) -> None:
    status, out, _ = d9d("explain", str(small_job(device="cuda", parallel=["compile"])))
    lines = [line.strip() for line in out.splitlines()]
    assert status == 0
    (at,) = (place for place, line in enumerate(lines) if line.startswith("silu_mul: recomputed "))
    assert lines[at].endswith(", compiled")
    assert "triton accepts, priority 0: inductor" in " ".join(lines[at : at + 6])
    assert any(line == "rms_norm: triton (d9d-triton 0.1.0) at norm.rms_norm" for line in lines)


@pytest.mark.thorough
@pytest.mark.parametrize(("offload", "backend"), [(False, "triton"), (True, "reference")])
def test_kernels_of_a_gpu_are_left_out_where_gradients_live_in_the_host_s_memory(
    small_job: Write, d9d: D9d, offload: bool, backend: str
) -> None:
    fsdp = {"name": "fsdp", "offload": offload}
    status, out, err = d9d("explain", str(small_job(device="cuda", mesh={"dp_shard": 2}, parallel=[fsdp])))
    assert status == 0, err
    lines = [line.strip() for line in out.splitlines()]
    for op in ("adamw", "gradient_power"):
        assert any(line.startswith(f"{op}: {backend} ") for line in lines)


@pytest.mark.parametrize("part", ["rms_norm", "rope"])
def test_head_norms_and_rotations_are_apart_where_the_job_names_a_backend_of_one(
    small_job: Write, d9d: D9d, part: str
) -> None:
    chosen = {}
    for kernels in ({}, {part: "reference"}):
        status, out, err = d9d("explain", str(small_job(device="cuda", kernels=kernels)))
        assert status == 0, err
        (line,) = (line.split()[1] for line in out.splitlines() if line.strip().startswith("normed_rope: "))
        chosen[len(kernels)] = line
    assert chosen == {0: "triton", 1: "reference"}
