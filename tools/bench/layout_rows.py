"""Rows of the comparison of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rows import LORA, Row

DENSE = Row("dense-2b", 4, 4096, compiled=True)
_MOE = Row("moe-5.6b", 4, 4096, compiled=True)
_LONG = Row("dense-2b", 1, 32_768, compiled=True, recomputed=True)
_SHARDED = (("dp_shard", 2),)
_KEPT = {"name": "fsdp", "reshard_after_forward": False}
_ASYNCHRONOUS = {"name": "tensor_parallel", "asynchronous": True}


def context_row(method: str, samples: int, length: int) -> Row:
    """Row of ``context_parallel`` over two ranks, with gradients reduced by ``fsdp``."""
    base = replace(DENSE, samples=samples, length=length, recomputed=length >= 32_768)
    return replace(base, mesh=(("cp", 2),), parallel=({"name": "context_parallel", "method": method}, "fsdp"))


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
    # Documents of 4,096 tokens, so that a step of a million takes seconds; its memory equals a single document's. The
    # first of each fits into 80 GB.
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
    "tiny": (
        Row("tiny", 2, 64),
        Row("tiny-moe", 2, 64),
        Row("tiny", 2, 64, mesh=_SHARDED, parallel=("fsdp",)),
        Row("tiny-moe", 2, 64, mesh=(*_SHARDED, ("ep", 2)), parallel=("fsdp", "expert_parallel")),
        Row("tiny", 4, 64, mesh=(("tp", 2),), parallel=(_ASYNCHRONOUS,)),
        replace(context_row("ring", 1, 64), model="tiny", compiled=False, document=16),
        Row("tiny", 4, 64, microbatch=1, mesh=(("pp", 2),), schedule="1f1b"),
        Row("tiny", 4, 63, mesh=(("tp", 2),), parallel=("tensor_parallel",)),
        Row("tiny-moe", 4, 64, optimizer="stochastic_adamw narrow", peft=LORA),
    ),
}  # fmt: skip
