"""Rows of the comparison of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rows import LORA, Row

DENSE = Row("dense-2b", 4, 4096, compiled=True)
_MOE = Row("moe-5.6b", 4, 4096, compiled=True)
_LONG = Row("dense-2b", 1, 32_768, compiled=True, recomputed=True)
_LLAMA = Row("llama-8b", 1, 8192, compiled=True)
_DELTA = Row("qwen3.5-3.8b", 1, 32_768, compiled=True, recomputed=True)
_30B = Row("qwen3-30b-a3b", 4, 4096, compiled=True)
_SHARDED = (("dp_shard", 2),)
_EXPERTS = ("fsdp", "expert_parallel")
_STAGES_OF_EXPERTS = (("pp", 2), ("dp_shard", 2), ("ep", 2))
_KEPT = {"name": "fsdp", "reshard_after_forward": False}
_ASYNCHRONOUS = {"name": "tensor_parallel", "asynchronous": True}


def context_row(method: str, samples: int, length: int, base: Row = DENSE) -> Row:
    """Row of ``context_parallel`` over two ranks, with gradients reduced by ``fsdp``."""
    base = replace(base, samples=samples, length=length, recomputed=length >= 32_768)
    return replace(base, mesh=(("cp", 2),), parallel=({"name": "context_parallel", "method": method}, "fsdp"))


def _wide_rows(ranks: int) -> tuple[Row, ...]:
    """Rows over four or eight ranks, without pipelines, and the same jobs on one GPU."""
    sharded = (("dp_shard", ranks),)
    spread = (*sharded, ("ep", ranks))
    long = replace(_LONG, length=131_072, mesh=(("cp", ranks),))
    return (
        replace(_MOE, mesh=spread, parallel=_EXPERTS),
        replace(_MOE, mesh=sharded, parallel=("fsdp",)),
        replace(_MOE, mesh=sharded, parallel=(_KEPT,)),
        replace(DENSE, mesh=(("dp_replicate", ranks),), parallel=("replicate",)),
        replace(DENSE, mesh=sharded, parallel=("fsdp",)),
        replace(DENSE, mesh=sharded, parallel=(_KEPT,)),
        replace(DENSE, mesh=(("dp_replicate", 2), ("dp_shard", ranks // 2)), parallel=("hsdp",)),
        replace(DENSE, samples=8, mesh=(("dp_shard", ranks // 2), ("tp", 2)), parallel=("tensor_parallel", "fsdp")),
        replace(_LLAMA, mesh=sharded, parallel=("fsdp",)),
        replace(_LLAMA, mesh=sharded, parallel=(_KEPT,)),
        replace(_MOE, mesh=(("dp_replicate", ranks),), parallel=("replicate",)),
        *(
            replace(long, parallel=({"name": "context_parallel", "method": method}, "fsdp"))
            for method in ("all_gather", "ring", "ulysses")
        ),
        DENSE, _MOE, _LLAMA,
    )  # fmt: skip


def _large_rows(ranks: int) -> tuple[Row, ...]:
    """Rows of models that need four or eight GPUs."""
    sharded = (("dp_shard", ranks),)
    spread = (*sharded, ("ep", ranks))
    return (
        replace(_30B, samples=2, mesh=spread, parallel=_EXPERTS),
        replace(_30B, samples=2, mesh=sharded, parallel=("fsdp",)),
        Row("qwen3-32b", 2, 4096, compiled=True, recomputed=True, mesh=sharded, parallel=("fsdp",)),
        replace(_30B, recomputed=True, mesh=sharded, parallel=("fsdp",)),
        replace(_30B, samples=3, mesh=spread, parallel=_EXPERTS),
    )


def _pipeline_rows(ranks: int) -> tuple[Row, ...]:
    """Rows with pipelines over four or eight ranks."""
    stages = replace(DENSE, samples=4 * ranks, microbatch=1, mesh=(("pp", ranks),))
    mixed = replace(_MOE, samples=8, microbatch=1, mesh=_STAGES_OF_EXPERTS, parallel=_EXPERTS)
    return (
        *(replace(stages, schedule=schedule) for schedule in ("zero_bubble_v", "dual_pipe_v")),
        replace(mixed, schedule="dual_pipe_v"),
        *(replace(stages, schedule=schedule) for schedule in ("interleaved_1f1b", "zb1p", "1f1b")),
        replace(mixed, schedule="1f1b"),
        replace(_30B, samples=8, microbatch=1, mesh=_STAGES_OF_EXPERTS, parallel=_EXPERTS, schedule="dual_pipe_v"),
        *(replace(stages, schedule=schedule) for schedule in ("gpipe", "looped_bfs")),
    )


#: Rows by topic; 16,384 tokens per GPU and step, or one sample if that is longer.
ROWS: Mapping[str, tuple[Row, ...]] = {
    "scaling": (
        _MOE,
        DENSE,
        replace(DENSE, samples=1, length=16_384),
        replace(_MOE, mesh=(*_SHARDED, ("ep", 2)), parallel=("fsdp", "expert_parallel")),
        replace(_MOE, mesh=_SHARDED, parallel=("fsdp",)),
        replace(DENSE, mesh=(("dp_replicate", 2),), parallel=("replicate",)),
        replace(DENSE, mesh=_SHARDED, parallel=("fsdp",)),
        replace(DENSE, mesh=_SHARDED, parallel=(_KEPT,)),
        replace(_MOE, mesh=_SHARDED, parallel=(_KEPT,)),
        replace(_MOE, mesh=(("dp_replicate", 2),), parallel=("replicate",)),
        replace(DENSE, samples=8, mesh=(("tp", 2),), parallel=("tensor_parallel",)),
        context_row("all_gather", 2, 16_384),
        context_row("ring", 2, 16_384),
        context_row("ulysses", 2, 16_384),
        replace(DENSE, samples=8, microbatch=1, mesh=(("pp", 2),), schedule="1f1b"),
    ),
    "asynchronous": tuple(
        replace(DENSE, samples=8, mesh=(("tp", 2),), parallel=(way,)) for way in ("tensor_parallel", _ASYNCHRONOUS)
    ),
    "long": (
        *(replace(_LONG, length=length) for length in (32_768, 131_072)),
        *(
            context_row(method, 1, length)
            for length in (32_768, 131_072)
            for method in ("all_gather", "ring", "ulysses")
        ),
    ),
    # Gated DeltaNet, and attention in every fourth layer.
    "delta": tuple(
        row
        for length in (32_768, 131_072)
        for row in (context_row("all_gather", 1, length, _DELTA), replace(_DELTA, length=length))
    ),
    # Documents of 4,096 tokens, so that a step of a million tokens takes seconds; the memory is the same as with
    # samples of one document. The first row of each kind fits into 80 GB.
    "longest": (
        *(replace(_LONG, length=count * 65_536, document=4096) for count in (4, 5)),
        *(replace(context_row("all_gather", 1, count * 65_536), document=4096) for count in (9, 10, 11)),
    ),
    "large": (
        Row("qwen3-30b-a3b", 4, 4096, compiled=True, recomputed=True, peft=LORA),
        Row(
            "qwen3-30b-a3b", 4, 4096, compiled=True, recomputed=True, optimizer="stochastic_adamw narrow",
            mesh=(*_SHARDED, ("ep", 2)), parallel=("fsdp", "expert_parallel"),
        ),
    ),
    "four": _wide_rows(4),
    "four-large": _large_rows(4),
    "four-pipelines": _pipeline_rows(4),
    "eight": _wide_rows(8),
    "eight-large": _large_rows(8),
    "eight-pipelines": _pipeline_rows(8),
    "tiny": (
        Row("tiny", 2, 64),
        Row("tiny-moe", 2, 64),
        Row("tiny", 2, 64, mesh=_SHARDED, parallel=("fsdp",)),
        Row("tiny-moe", 2, 64, mesh=(*_SHARDED, ("ep", 2)), parallel=("fsdp", "expert_parallel")),
        Row("tiny", 4, 64, mesh=(("tp", 2),), parallel=(_ASYNCHRONOUS,)),
        replace(context_row("ring", 1, 64), model="tiny", compiled=False, document=16),
        replace(context_row("all_gather", 1, 64), model="tiny-delta", compiled=False),
        Row("tiny", 4, 64, microbatch=1, mesh=(("pp", 2),), schedule="1f1b"),
        Row("tiny", 4, 63, mesh=(("tp", 2),), parallel=("tensor_parallel",)),
        Row("tiny-moe", 4, 64, optimizer="stochastic_adamw narrow", peft=LORA),
    ),
}  # fmt: skip
