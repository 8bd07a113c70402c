"""Mappers of the tensors of Qwen3-Next and Qwen3.5, from transformers' files to d9d.

Shapes: H features, K key heads, N value heads, n = N / K value heads of a key head, D_k and D_v features of a key and
value head, W positions that a convolution reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from d9d_nn.decoder.multi_token import tensors_of_layer
from d9d_nn.rms_norm import OffsetRMSNorm
from d9d_qwen3.hugging_face.expert_names import mixture, mixtures
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.compose import Prefix
from d9d_weights.graph.mappers import Rename, Squeeze
from d9d_weights.graph.merging import Chunk, Concatenate
from d9d_weights.graph.select import Drop, Either, Fresh
from d9d_weights.hugging_face.family import ATTENTION, HEAD_NORMS, SWIGLU
from d9d_weights.hugging_face.names import layer_names

from d9d_qwen3_next.block import build_block
from d9d_qwen3_next.config import HybridConfig, Qwen3NextConfig

_NORMS = {name: ours for name, ours in ATTENTION.items() if ours.endswith("_norm")}
_ATTENTION = {name: ours for name, ours in ATTENTION.items() if name not in _NORMS} | HEAD_NORMS
_SHARED = {f"mlp.shared_expert.{name}": f"ffn.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
_SHARED_AND_GATE = _SHARED | {"mlp.shared_expert_gate": "ffn.shared_gate"}
#: Parameters of Gated DeltaNet that differ only in their names.
_DELTA = {
    "A_log": "decay.A_log",
    "dt_bias": "decay.dt_bias",
    "norm.weight": "norm.weight",
    "out_proj.weight": "o_proj.weight",
}


#: Names in the layer of multi-token prediction, outside of its decoder block: in the files -> d9d's.
_FURTHER = {
    "fc": "projection",
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "norm": "norm",
}


def text_only(*, further: bool) -> Mapper:
    """Mapper that leaves out image encoders, and renames the tensors of the text model.

    Args:
        further: whether to keep the layer of multi-token prediction.
    """
    return Parallel(
        *(() if further else (Drop("mtp.{rest*}", optional=True),)),
        Drop("model.visual.{rest*}", optional=True),
        Rename("model.language_model.{rest*}", "model.{rest*}", optional=True),
    )


def layer_mappers(config: HybridConfig, *, joined: bool) -> Iterator[Mapper]:
    """Mappers of norms, attention, Gated DeltaNet and dense feed-forward layers, of all layers.

    Args:
        config: config of the model.
        joined: whether files hold the input projections of Gated DeltaNet in two matrices, rows sorted by key head.
    """
    yield from layer_names(_NORMS)
    dense = config.dense_layers if isinstance(config, Qwen3NextConfig) else range(config.num_layers)
    yield from layer_names(SWIGLU) if dense else ()
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        if config.is_recurrent(layer):
            yield Prefix(f"{theirs}linear_attn.", f"{ours}attention.", _gated_delta_net(config, joined=joined))
        else:
            yield Prefix(theirs, ours, Parallel(*_attention(config)))


def expert_mappers(config: Qwen3NextConfig, stored: Qwen3NextConfig) -> Iterator[Mapper]:
    """Mappers of routers, experts, shared experts and their gates, from a model with config ``stored``.

    Raises:
        CheckpointError: see :func:`d9d_qwen3.hugging_face.expert_names.mixtures`.
    """
    yield from mixtures(config, stored)
    yield from layer_names(_SHARED_AND_GATE)


def further_mapper(config: HybridConfig, stored: HybridConfig) -> Mapper:
    """Mapper of the layer of multi-token prediction; if the files lack it, the layer is initialised anew."""
    theirs, ours = "mtp.layers.0", "mtp.0.block"
    renamed = {f"mtp.{name}": f"mtp.0.{our}" for name, our in _FURTHER.items()}
    in_block, mixtures_here = dict(_NORMS), list[Mapper]()
    if isinstance(config, Qwen3NextConfig) and isinstance(stored, Qwen3NextConfig):
        in_block |= _SHARED_AND_GATE
        mixtures_here += mixture(config, stored, theirs, ours)
    else:
        in_block |= SWIGLU
    renamed |= {f"{theirs}.{name}": f"{ours}.{our}" for name, our in in_block.items()}
    layer = Parallel(
        *(Rename(f"{name}.weight", f"{our}.weight") for name, our in renamed.items()),
        Prefix(f"{theirs}.", f"{ours}.", Parallel(*_attention(config))),
        *mixtures_here,
    )
    new = tensors_of_layer(config, build_block, norm=OffsetRMSNorm)
    return Either(layer, Fresh(tuple(f"mtp.0.{name}" for name in new)))


def _attention(config: HybridConfig) -> Iterator[Mapper]:
    biased = config.biased_projections()
    for theirs, ours in _ATTENTION.items():
        for kind in ("weight", "bias") if ours.rpartition(".")[2] in biased else ("weight",):
            yield Rename(f"{theirs}.{kind}", f"{ours}.{kind}")


def _gated_delta_net(config: HybridConfig, *, joined: bool) -> Mapper:
    keys, values = config.key_features, config.linear_value_features
    convolutions = ("q_conv.weight", "k_conv.weight", "v_conv.weight")
    return Parallel(
        *(Rename(theirs, ours) for theirs, ours in _DELTA.items()),
        Squeeze("conv1d.weight", 1) >> Chunk("conv1d.weight", convolutions, sizes=(keys, keys, values)),
        *(_of_key_heads(config) if joined else _separate(config)),
    )


def _separate(config: HybridConfig) -> Iterator[Mapper]:
    """Mappers of Qwen3.5's projections: queries, keys and values share one matrix [2 K D_k + N D_v, H] in files."""
    keys, values = config.key_features, config.linear_value_features
    yield Chunk("in_proj_qkv.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight"), sizes=(keys, keys, values))
    for theirs, ours in (("in_proj_z", "gate_proj"), ("in_proj_b", "beta_proj"), ("in_proj_a", "decay_proj")):
        yield Rename(f"{theirs}.weight", f"{ours}.weight")


def _of_key_heads(config: HybridConfig) -> Iterator[Mapper]:
    """Mappers of Qwen3-Next's projections, whose rows are sorted by key head.

    One matrix has for each key head the rows of its query, key, n values and n gates [2 D_k + 2 n D_v, H], the other
    the rows of n strengths (beta) and n decays [2 n, H].
    """
    heads = config.linear_num_key_heads
    keys, shared = config.linear_key_head_dim, config.linear_num_value_heads // heads
    values = shared * config.linear_value_head_dim
    projections = {"q_proj": keys, "k_proj": keys, "v_proj": values, "gate_proj": values}
    yield _sorted_by_head("in_proj_qkvz.weight", projections, heads)
    yield _sorted_by_head("in_proj_ba.weight", {"beta_proj": shared, "decay_proj": shared}, heads)


def _sorted_by_head(joint: str, rows: Mapping[str, int], heads: int) -> Mapper:
    """Mapper from one matrix, in which all projections' rows of a head follow each other, to a matrix per projection.

    Args:
        joint: name of the matrix in the files.
        rows: number of rows of a head in each projection, by the projection's name.
        heads: number of heads.
    """
    pieces: Sequence[str] = [f"{name}.{head}" for head in range(heads) for name in rows]
    sizes = list(rows.values()) * heads
    together = (
        Concatenate([f"{name}.{head}" for head in range(heads)], f"{name}.weight", sizes=[size] * heads)
        for name, size in rows.items()
    )
    return Chunk(joint, pieces, sizes=sizes) >> Parallel(*together)
