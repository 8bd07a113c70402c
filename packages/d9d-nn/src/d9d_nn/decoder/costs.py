"""Costs of decoders, from their configs alone. Imports no torch.

A model family states whether its attention has head norms, and passes the cost of its feed-forward layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from d9d_core.cost import BlockCost, Exchange, OpCost, Share, StageCost, Weight
from d9d_core.errors import BuildError
from d9d_core.model import Stage

from d9d_nn.costs import (
    attention,
    embedding,
    linear,
    linear_cross_entropy,
    rms_norm,
    rotated_heads,
    rotation,
    silu_mul,
)
from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.decoder.stages import layers_of
from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig, TokenClassificationHeadConfig


class FeedForwardCost(NamedTuple):
    """Cost of the feed-forward part of a layer, see :class:`~d9d_core.cost.BlockCost`.

    Attributes:
        name: name of the layers that have this feed-forward part.
        ops: ops of the feed-forward part.
        parameters, experts: number of all its parameters, and number of its experts' parameters.
        workspace: peak bytes of its backward, except hidden states.
        exchanges, backward_exchanges: collectives of the forward and of the backward.
    """

    name: str
    ops: tuple[OpCost, ...]
    parameters: int
    experts: int = 0
    workspace: float = 0.0
    exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()


class MixerCost(NamedTuple):
    """Cost of the part of a layer in which tokens mix, such as attention, between its norm and the residual addition.

    Attributes:
        ops: ops of this part.
        exchanges, backward_exchanges: collectives of the forward and of the backward, except the sequence-parallel
            all-gather and reduce-scatter over ``tp``.
    """

    ops: tuple[OpCost, ...]
    exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()


#: Function of config, layer index and share that returns the cost of the part of the layer in which tokens mix.
Mixer = Callable[[Any, int, Share], MixerCost]

#: Function of config, layer index and share that returns the cost of the layer's feed-forward part; raises
#: ``BuildError`` if it cannot be divided over the ranks.
FeedForward = Callable[[Any, int, Share], FeedForwardCost]


def decoder_cost(
    config: DecoderConfig,
    stage: Stage,
    share: Share,
    feed_forward: FeedForward,
    *,
    head_norms: bool = False,
    output_norms: bool = False,
    mixer: Mixer | None = None,
) -> StageCost:
    """Cost of a stage of a decoder: embedding, layers, layers of multi-token prediction, and final norm with heads.

    Args:
        config: config of the whole model.
        stage: pipeline stage.
        share: share of one rank.
        feed_forward: function that returns the cost of the feed-forward part of a layer.
        head_norms: whether attention normalises the heads of queries and keys.
        output_norms: whether the outputs of attention and feed-forward are normalised.
        mixer: function that returns the cost of the attention part of a layer; by default :func:`attention_cost` with
            ``head_norms``.

    Raises:
        BuildError: the heads, positions or feed-forward layers cannot be divided over the ranks.
    """
    _check(config, share)
    mix = partial(attention_cost, head_norms=head_norms) if mixer is None else mixer
    blocks: list[BlockCost] = []
    depths = config.multi_token().depths if stage.is_last else 0
    if stage.is_first:
        blocks.append(_embedding(config, share, 1 + depths))

    def layer_cost(layer: int) -> BlockCost:
        return _layer(config, share, mix(config, layer, share), feed_forward(config, layer, share), output_norms)

    for first, layers in _alike(config, layers_of(config, stage)).items():
        names = tuple(f"layers.{layer}" for layer in layers)
        blocks.append(replace(layer_cost(first), count=len(layers), names=names))
    if depths and not stage.is_first:
        blocks.append(_embedding(config, share, depths))
    further = range(config.num_layers, config.num_layers + depths)
    for first, layers in _alike(config, further).items():
        names = tuple(f"mtp.{layer - config.num_layers}" for layer in layers)
        blocks.append(replace(_further(config, share, layer_cost(first)), count=len(layers), names=names))
    if stage.is_last:
        blocks.append(_heads(config, stage, share))
    return StageCost(tuple(blocks), 0.0 if stage.is_last else state_bytes(config, share))


def swiglu_cost(config: Any, _layer: int, share: Share) -> FeedForwardCost:
    """Cost of the SwiGLU or GeGLU of a decoder layer, whose inner features are split over ``tp``.

    Raises:
        BuildError: the number of ranks does not divide the features.
    """
    return gated_cost(config, share, config.intermediate_size)


def gated_cost(
    config: DecoderConfig, share: Share, intermediate_size: int, prefix: str = "ffn", *, keeps_input: bool = True
) -> FeedForwardCost:
    """Cost of a SwiGLU or GeGLU with these inner features, which are split over ``tp``.

    Args:
        config: config of the whole model.
        share: share of one rank.
        intermediate_size: inner features of all ranks.
        prefix: name of the layer inside its block.
        keeps_input: whether the input is kept for the backward; false if another layer keeps the same tensor.

    Raises:
        BuildError: the number of ranks does not divide the features.
    """
    tp, hidden, width, tokens = share.tensor, config.hidden_size, share.width, share.tokens
    if intermediate_size % tp:
        raise BuildError(
            f"mesh.tp is {tp}, which does not divide intermediate_size {intermediate_size}; choose a divisor"
        )
    features = intermediate_size // tp
    into, out_of = (
        _matrices(prefix, ("gate_proj", "up_proj"), features, hidden, 0),
        _matrices(prefix, ("down_proj",), hidden, features, 1),
    )
    ops = (
        linear("gate, up", tokens, hidden, 2 * features, width, keeps_input=keeps_input, weights=into),
        silu_mul(tokens, features, width, compiled=share.compiled),
        linear("down", tokens, features, hidden, width, keeps_input=False, weights=out_of),
    )
    around = sequence_exchanges(config, share)
    return FeedForwardCost("layer", ops, 3 * hidden * features, 0, 2 * width * tokens * features, around, around)


def dense_cost(
    config: DecoderConfig,
    stage: Stage,
    share: Share,
    *,
    head_norms: bool = False,
    output_norms: bool = False,
    mixer: Mixer | None = None,
) -> StageCost:
    """Cost of a stage of a dense decoder; see :func:`decoder_cost`.

    Raises:
        BuildError: the model cannot be divided over the ranks, or ``mesh.ep`` is set.
    """
    if share.experts > 1:
        raise BuildError(f"mesh.ep is {share.experts}, but the model has no experts; remove mesh.ep")
    norms = {"head_norms": head_norms, "output_norms": output_norms}
    return decoder_cost(config, stage, share, swiglu_cost, mixer=mixer, **norms)


def state_bytes(config: DecoderConfig, share: Share) -> float:
    """Bytes of the residual stream of this rank, which holds S / tp positions of each sample."""
    return share.width * share.tokens / share.tensor * config.hidden_size


def sequence_exchanges(config: DecoderConfig, share: Share) -> tuple[Exchange, ...]:
    """All-gather and reduce-scatter of positions around attention or feed-forward, the same in the backward."""
    if share.tensor == 1:
        return ()
    size = share.width * share.tokens * config.hidden_size
    return Exchange("all_gather", "tp", size), Exchange("reduce_scatter", "tp", size)


def _alike(config: DecoderConfig, layers: range) -> dict[int, list[int]]:
    """All layers of each kind, by the index of the first layer of this kind."""
    kinds: dict[Hashable, list[int]] = {}
    for layer in layers:
        kinds.setdefault(config.kind(layer), []).append(layer)
    return {alike[0]: alike for alike in kinds.values()}


def _check(config: DecoderConfig, share: Share) -> None:
    tp, heads, pairs = share.tensor, config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        raise BuildError(f"mesh.tp is {tp}, which does not divide the {heads} query heads; choose a divisor")
    if pairs % tp and tp % pairs:
        raise BuildError(
            f"mesh.tp is {tp}, neither a divisor nor a multiple of the {pairs} key and value heads; choose one"
        )
    if share.length % (tp * share.context):
        raise BuildError(
            f"mesh.tp x mesh.cp = {tp} x {share.context} does not divide the {share.length} positions of a sample"
        )


def _layer(
    config: DecoderConfig,
    share: Share,
    mixer: MixerCost,
    feed_forward: FeedForwardCost,
    output_norms: bool,
) -> BlockCost:
    width, hidden, own = share.width, config.hidden_size, share.tokens / share.tensor
    names = ("attention_norm", "ffn_norm", *(("post_attention_norm", "post_ffn_norm") if output_norms else ()))
    norms = [rms_norm(name, own, hidden, width, weights=(Weight(f"{name}.weight", (hidden,)),)) for name in names]
    parameters = sum(weight.numbers for op in mixer.ops for weight in op.weights)
    around, state = sequence_exchanges(config, share), state_bytes(config, share)
    return BlockCost(
        feed_forward.name,
        (norms[0], *mixer.ops, *norms[2:3], norms[1], *feed_forward.ops, *norms[3:]),
        parameters + len(norms) * hidden + feed_forward.parameters,
        feed_forward.experts,
        state,
        3 * state + feed_forward.workspace,
        (*around, *mixer.exchanges, *feed_forward.exchanges),
        (*around, *mixer.backward_exchanges, *feed_forward.backward_exchanges),
    )


def attention_cost(
    config: DecoderConfig,
    layer: int,
    share: Share,
    *,
    head_norms: bool,
    output_gate: bool = False,
    sinks: bool = False,
) -> MixerCost:
    """Cost of the grouped-query attention of a layer.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
        share: share of one rank.
        head_norms: whether the heads of queries and keys are normalised.
        output_gate: whether the query projection also computes gates of the attention's output.
        sinks: whether query heads have learned sinks.
    """
    width, hidden, head, tokens = share.width, config.hidden_size, config.head_dim, share.tokens
    queries = config.num_attention_heads / share.tensor
    # With fewer key and value heads than ranks, several ranks compute the same head.
    pairs = max(config.num_key_value_heads / share.tensor, 1)
    outputs, projected = int(queries) * head, 2 if output_gate else 1
    inside = (projected * queries + 2 * pairs) * head
    into = _linear(config, "q_proj", projected * outputs, hidden, 0)
    for name in ("k_proj", "v_proj"):
        if config.num_key_value_heads < share.tensor:  # every rank holds the weights of all key/value heads
            into += _linear(config, name, config.num_key_value_heads * head, hidden, None)
        else:
            into += _linear(config, name, int(pairs * head), hidden, 0)
    out_of = _linear(config, "o_proj", hidden, outputs, 1)
    heads = Weight("attention.q_norm.weight", (head,)), Weight("attention.k_norm.weight", (head,))
    placed = (
        rotated_heads(tokens, queries + pairs, head, width, weights=heads)
        if head_norms
        else rotation(tokens, queries + pairs, head, width)
    )
    mixing = attention(tokens, config.attended_keys(layer, share.length), queries, pairs, head, width)
    if sinks:
        mixing = replace(mixing, weights=(Weight("attention.sinks.weight", (int(queries),), cut=0),))
    ops = (
        linear("query, key, value", tokens, hidden, inside, width, weights=tuple(into)),
        placed,
        mixing,
        *((_gate("output gate", tokens, outputs, width, keeps_gate=head_norms),) if output_gate else ()),
        linear("output", tokens, outputs, hidden, width, keeps_input=output_gate, weights=tuple(out_of)),
    )
    return MixerCost(ops)


def _gate(name: str, rows: float, features: float, width: int, *, keeps_gate: bool) -> OpCost:
    """Cost of a product with a gate's sigmoid, which is kept; attention keeps its own output.

    Args:
        name: name of the op.
        rows: rows of the gate.
        features: columns of the gate.
        width: bytes of a number.
        keeps_gate: whether the gate stays in memory too, because the norm of the query heads keeps its input, which is
            the other half of the same projection's output.
    """
    size = width * rows * features
    return OpCost(name, "memory", traffic=5 * size, backward_traffic=7 * size, kept=(2 if keeps_gate else 1) * size)


def _linear(config: DecoderConfig, name: str, outputs: int, features: int, cut: int | None) -> list[Weight]:
    """Weight and optional bias of an attention projection."""
    weight = Weight(f"attention.{name}.weight", (outputs, features), "linear", cut)
    bias = Weight(f"attention.{name}.bias", (outputs,), cut=0 if cut == 0 else None)
    return [weight, bias] if name in config.biased_projections() else [weight]


def _matrices(prefix: str, names: tuple[str, ...], outputs: int, features: int, cut: int) -> tuple[Weight, ...]:
    """Weights of projections of a feed-forward layer."""
    return tuple(Weight(f"{prefix}.{name}.weight", (outputs, features), "linear", cut) for name in names)


def _embedding(config: DecoderConfig, share: Share, lookups: int) -> BlockCost:
    """Cost of the embedding; multi-token prediction looks up several tokens for each position."""
    words, hidden, tokens = -(-config.vocab_size // share.tensor), config.hidden_size, lookups * share.tokens
    table = Weight("embedding.weight", (words, hidden), "embedding", 0)
    cost = embedding(tokens, words, hidden, share.width, weights=(table,))
    size = share.width * tokens * hidden
    back = (Exchange("all_gather", "tp", size),) if share.tensor > 1 else ()
    out = (Exchange("reduce_scatter", "tp", size),) if share.tensor > 1 else ()
    return BlockCost("embedding", (cost,), words * hidden, exchanges=out, backward_exchanges=back, is_block=False)


def _further(config: DecoderConfig, share: Share, layer: BlockCost) -> BlockCost:
    """Cost of a layer of multi-token prediction: norms and projection of S / tp positions, and a decoder layer."""
    width, hidden, own = share.width, config.hidden_size, share.tokens / share.tensor
    names = ("embedding_norm", "hidden_norm", "norm")
    norms = [rms_norm(name, own, hidden, width, weights=(Weight(f"{name}.weight", (hidden,)),)) for name in names]
    joined = width * own * 2 * hidden
    projection = (Weight("projection.weight", (hidden, 2 * hidden), "linear"),)
    inside = (
        replace(op, weights=tuple(replace(weight, name=f"block.{weight.name}") for weight in op.weights))
        for op in layer.ops
    )
    ops = (
        *norms[:2],
        OpCost("joined states", "memory", traffic=2 * joined, backward_traffic=2 * joined),
        linear("projection", own, 2 * hidden, hidden, width, weights=projection),
        *inside,
        norms[2],
    )
    return replace(
        layer,
        name="further token",
        ops=ops,
        parameters=layer.parameters + 2 * hidden**2 + len(names) * hidden,
        input=2 * layer.input,  # two inputs: hidden states, and embeddings of later tokens
        workspace=layer.workspace + joined,
    )


def _classes(name: str, classes: int, hidden: int, share: Share, of_tokens: bool) -> OpCost:
    """Cost of a classifier's projection, replicated over ``tp``: of all tokens, with a bias, or of pooled samples."""
    weights = [Weight(f"{name}.weight", (classes, hidden))]
    if of_tokens:
        weights.append(Weight(f"{name}.bias", (classes,)))
    rows = share.tokens if of_tokens else share.samples
    return linear("classes", rows, hidden, classes, share.width, weights=tuple(weights))


def _heads(config: DecoderConfig, stage: Stage, share: Share) -> BlockCost:
    hidden, width, depths = config.hidden_size, share.width, config.multi_token().depths
    words = -(-config.vocab_size // share.tensor)
    norm = Weight("norm.weight", (hidden,))
    ops: list[OpCost] = [rms_norm("norm", share.tokens / share.tensor, hidden, width, weights=(norm,))]
    workspace, parameters = 0.0, hidden
    tokens = (1 + depths) * share.tokens  # number of rows that the head computes
    has_embedding = stage.is_first or depths > 0
    for name, head in config.heads.items():
        if head.kind == "causal_lm":
            owner = "embedding" if config.tie_embeddings else f"heads.{name}"
            projection = (Weight(f"{owner}.weight", (words, hidden), "head", 0),)
            both, besides = linear_cross_entropy(tokens, hidden, words, width, share.memory, weights=projection)
            ops += both
            workspace = max(workspace, besides)
            # A tied head on a stage without embedding has its own copy of the weight.
            parameters += 0 if config.tie_embeddings and has_embedding else words * hidden
        elif isinstance(head, ClassificationHeadConfig | TokenClassificationHeadConfig):
            of_tokens = isinstance(head, TokenClassificationHeadConfig)
            ops.append(_classes(f"heads.{name}", head.num_classes, hidden, share, of_tokens))
            parameters += sum(weight.numbers for weight in ops[-1].weights)
        elif isinstance(head, EmbeddingHeadConfig) and head.projection is not None:
            ops.append(_classes(f"heads.{name}", head.projection, hidden, share, of_tokens=False))
            parameters += sum(weight.numbers for weight in ops[-1].weights)
    size = width * tokens * hidden
    ahead = (Exchange("all_gather", "tp", size),) if share.tensor > 1 else ()
    back = (Exchange("reduce_scatter", "tp", size),) if share.tensor > 1 else ()
    return BlockCost(
        "norm and heads",
        tuple(ops),
        parameters,
        workspace=workspace,
        exchanges=ahead,
        backward_exchanges=back,
        is_block=False,
    )
