"""Mappers for names and layouts of routers and experts, between transformers and d9d.

Shapes: E experts, H features, I features inside an expert.
"""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.errors import CheckpointError
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.compose import Prefix
from d9d_weights.graph.mappers import Rename, Transpose
from d9d_weights.graph.merging import Chunk, Stack
from d9d_weights.graph.select import Drop, Either, Fresh

from d9d_qwen3.moe_config import Qwen3MoeConfig


def mixtures(config: Qwen3MoeConfig, stored: Qwen3MoeConfig) -> Iterator[Mapper]:
    """Mappers of routers and experts, for all layers, from a model with config ``stored`` to a model with ``config``.

    Transformers has no selection bias; files store the bias under a name of d9d, which transformers ignores.

    Raises:
        CheckpointError: the stored model chooses experts by a selection bias, which this model lacks.
    """
    if stored.has_selection_bias and not config.has_selection_bias:
        raise CheckpointError(
            "the routers in the files choose experts with a bias (selection_bias), which this model would not have; "
            "add {name: bias_update} to model.balancing"
        )
    sparse = [layer for layer in range(config.num_layers) if layer not in config.dense_layers]
    theirs, ours = "model.layers.{layer}.mlp.gate", "layers.{layer}.ffn.router"
    yield Rename(f"{theirs}.weight", f"{ours}.weight")
    if not config.has_selection_bias:
        yield Drop(f"{theirs}.selection_bias", optional=True)
    elif stored.has_selection_bias:
        yield Rename(f"{theirs}.selection_bias", f"{ours}.selection_bias", optional=True)  # a buffer: may be missing
    else:
        yield Fresh(tuple(f"layers.{layer}.ffn.router.selection_bias" for layer in sparse))
    yield from (_experts(config, layer) for layer in sparse)


def _experts(config: Qwen3MoeConfig, layer: int) -> Mapper:
    """Mapper from both file layouts to d9d's layout: ``gate_proj`` and ``up_proj`` [E, H, I], ``down_proj`` [E, I, H].

    The inverse writes the layout that the config's ``expert_files`` names.
    """
    layouts = {"per_expert": _per_expert(config.num_experts), "fused": _fused()}
    first = layouts.pop(config.expert_files)
    inside = Either(first, *layouts.values())
    return Prefix(f"model.layers.{layer}.mlp.experts.", f"layers.{layer}.ffn.experts.", inside)


def _per_expert(count: int) -> Mapper:
    """Mapper from published files: gate and up projections [I, H], down projections [H, I] of each expert."""
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
