"""Mappers for names of routers and experts, between transformers and d9d."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from d9d_core.errors import CheckpointError
from d9d_moe.expert_files import expert_files
from d9d_weights.graph.base import Mapper
from d9d_weights.graph.mappers import Rename
from d9d_weights.graph.select import Drop, Fresh

from d9d_qwen3.moe_config import Qwen3MoeConfig


def mixtures(config: Qwen3MoeConfig, stored: Qwen3MoeConfig) -> Iterator[Mapper]:
    """Mappers of routers and experts, for all layers, from files of a model ``stored`` to a model with ``config``.

    transformers has no selection bias, so files store it under d9d's own name, which transformers ignores.

    Raises:
        CheckpointError: the stored model chooses experts by a selection bias, which this model lacks.
    """
    sparse = [layer for layer in range(config.num_layers) if layer not in config.dense_layers]
    fresh = [f"layers.{layer}" for layer in sparse]
    yield from _routers(config, stored, "model.layers.{layer}", "layers.{layer}", fresh)
    for layer in sparse:
        names = f"model.layers.{layer}.mlp.experts", f"layers.{layer}.ffn.experts"
        yield expert_files(*names, config.num_experts, config.expert_files)


def mixture(config: Qwen3MoeConfig, stored: Qwen3MoeConfig, theirs: str, ours: str) -> Iterator[Mapper]:
    """Mappers of the router and the experts of one layer.

    Args:
        config: config of the model to load into.
        stored: config of the model in the files.
        theirs: name of the layer in the files.
        ours: name of the layer in the model.

    Raises:
        CheckpointError: see :func:`mixtures`.
    """
    yield from _routers(config, stored, theirs, ours, [ours])
    yield expert_files(f"{theirs}.mlp.experts", f"{ours}.ffn.experts", config.num_experts, config.expert_files)


def _routers(
    config: Qwen3MoeConfig, stored: Qwen3MoeConfig, theirs: str, ours: str, layers: Sequence[str]
) -> Iterator[Mapper]:
    """Mappers of routers. ``theirs`` and ``ours`` are patterns of layer names; ``layers`` lists the names in d9d."""
    if stored.has_selection_bias and not config.has_selection_bias:
        raise CheckpointError(
            "the routers in the files choose experts with a bias (selection_bias), which this model would not have; "
            "add {name: bias_update} to model.balancing"
        )
    theirs, ours = f"{theirs}.mlp.gate", f"{ours}.ffn.router"
    yield Rename(f"{theirs}.weight", f"{ours}.weight")
    if not config.has_selection_bias:
        yield Drop(f"{theirs}.selection_bias", optional=True)
    elif stored.has_selection_bias:
        yield Rename(f"{theirs}.selection_bias", f"{ours}.selection_bias", optional=True)  # files may lack it
    else:
        yield Fresh(tuple(f"{layer}.ffn.router.selection_bias" for layer in layers))
