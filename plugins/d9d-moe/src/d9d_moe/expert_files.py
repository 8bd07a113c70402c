"""Mappers of the experts of a layer, between files of transformers and d9d.

Shapes: E experts, H features, I features inside an expert.
"""

from __future__ import annotations

from typing import Literal

from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.compose import Prefix
from d9d_weights.graph.mappers import Transpose
from d9d_weights.graph.merging import Chunk, Stack
from d9d_weights.graph.select import Either


def expert_files(
    theirs: str, ours: str, experts: int, written: Literal["per_expert", "fused"] = "per_expert"
) -> Mapper:
    """Mapper of expert weights from Hugging Face files, in either of two layouts, to d9d's stacked weights.

    The files have a tensor for each matrix of each expert (``per_expert``), or the two stacked tensors that
    transformers holds in memory (``fused``): ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I]. d9d has
    ``gate_proj`` and ``up_proj`` [E, H, I] and ``down_proj`` [E, I, H].

    Args:
        theirs: name of the experts in the files, such as ``model.layers.0.mlp.experts``.
        ours: name of the experts in d9d, such as ``layers.0.ffn.experts``.
        experts: E.
        written: layout of the files that the inverse mapper writes (for exports).
    """
    layouts = {"per_expert": _per_expert(experts), "fused": _fused()}
    first = layouts.pop(written)
    return Prefix(f"{theirs}.", f"{ours}.", Either(first, *layouts.values()))


def _per_expert(count: int) -> Mapper:
    """Mapper from a tensor per matrix of each expert: gate and up projections [I, H], down projections [H, I]."""
    return Parallel(
        *(
            Stack([f"{expert}.{matrix}.weight" for expert in range(count)], matrix) >> Transpose(matrix)
            for matrix in ("gate_proj", "up_proj", "down_proj")
        )
    )


def _fused() -> Mapper:
    """Mapper from transformers' memory layout: ``gate_up_proj`` [E, 2 I, H], ``down_proj`` [E, H, I]."""
    return Parallel(
        Transpose("gate_up_proj") >> Chunk("gate_up_proj", ("gate_proj", "up_proj"), dim=2),
        Transpose("down_proj"),
    )
