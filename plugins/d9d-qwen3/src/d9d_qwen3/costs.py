"""Cost description of Qwen3 models, from their config alone. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from d9d_core.cost import BlockCost, Exchange, OpCost, Share, StageCost, Weight
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_moe.costs import dispatch, grouped_swiglu, permutation, router
from d9d_nn.costs import attention, embedding, linear, linear_cross_entropy, rms_norm, rotated_heads, silu_mul
from d9d_nn.heads.config import ClassificationHeadConfig, TokenClassificationHeadConfig

from d9d_qwen3.config import Qwen3Config
from d9d_qwen3.flops import keys_of
from d9d_qwen3.moe_config import AnyQwen3Config, Qwen3MoeConfig
from d9d_qwen3.stages import layers_of


def stage_cost(config: AnyQwen3Config, stage: Stage, share: Share) -> StageCost:
    """Cost of a stage: embedding, layers, and final norm with heads.

    Raises:
        BuildError: the ranks of ``tp`` cannot share the heads, or those of ``ep`` the experts.
    """
    _check(config, share)
    blocks: list[BlockCost] = []
    if stage.is_first:
        blocks.append(_embedding(config, share))
    for first, layers in _alike(config, layers_of(config, stage)).items():
        names = tuple(f"layers.{layer}" for layer in layers)
        blocks.append(replace(_layer(config, first, share), count=len(layers), names=names))
    if stage.is_last:
        blocks.append(_heads(config, stage, share))
    boundary = 0.0 if stage.is_last else _state(config, share)
    return StageCost(tuple(blocks), boundary)


def _alike(config: AnyQwen3Config, layers: range) -> dict[int, list[int]]:
    """First layer of those that cost the same -> all of them: of the same kind, with the same window."""
    kinds: dict[object, list[int]] = {}
    for layer in layers:
        kind = (config.window(layer), isinstance(config, Qwen3MoeConfig) and layer in config.dense_layers)
        kinds.setdefault(kind, []).append(layer)
    return {alike[0]: alike for alike in kinds.values()}


def _check(config: AnyQwen3Config, share: Share) -> None:
    tp, heads, pairs = share.tensor, config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        raise BuildError(f"mesh.tp is {tp}, which does not divide the {heads} query heads of the model")
    if pairs % tp and tp % pairs:
        raise BuildError(f"mesh.tp is {tp}: {pairs} key and value heads can be neither split over it nor repeated")
    if share.length % (tp * share.context):
        raise BuildError(f"{share.length} positions cannot be split over tp = {tp} and cp = {share.context}")
    if isinstance(config, Qwen3MoeConfig):
        if config.num_experts % share.experts:
            raise BuildError(f"mesh.ep is {share.experts}, which does not divide {config.num_experts} experts")
    elif share.experts > 1:
        raise BuildError(f"mesh.ep is {share.experts}, but the model has no experts")
    if (isinstance(config, Qwen3Config) or config.dense_layers) and config.intermediate_size % tp:
        raise BuildError(f"mesh.tp is {tp}, which does not divide {config.intermediate_size} features of layers")


def _state(config: AnyQwen3Config, share: Share) -> float:
    """Bytes of the residual stream of this rank, which holds S / tp positions of each sample."""
    return share.width * share.tokens / share.tensor * config.hidden_size


def _layer(config: AnyQwen3Config, layer: int, share: Share) -> BlockCost:
    width, hidden, tp = share.width, config.hidden_size, share.tensor
    tokens, own = share.tokens, share.tokens / share.tensor
    queries = config.num_attention_heads / tp
    # Where there are fewer key and value heads than ranks, several ranks compute the same one.
    pairs = max(config.num_key_value_heads / tp, 1)
    inside = (queries + 2 * pairs) * config.head_dim
    outputs, head = int(queries) * config.head_dim, config.head_dim
    sizes = {"q_proj": outputs, "k_proj": int(pairs * head), "v_proj": int(pairs * head)}
    into = [weight for name, size in sizes.items() for weight in _linear(config, f"attention.{name}", size, hidden, 0)]
    out_of = _linear(config, "attention.o_proj", hidden, outputs, 1)
    heads = Weight("attention.q_norm.weight", (head,)), Weight("attention.k_norm.weight", (head,))
    norms = [
        rms_norm(name, own, hidden, width, weights=(Weight(f"{name}.weight", (hidden,)),))
        for name in ("attention_norm", "ffn_norm")
    ]
    keys = keys_of(config.window(layer), share.length)
    ops = [
        norms[0],
        linear("query, key, value", tokens, hidden, inside, width, weights=tuple(into)),
        rotated_heads(tokens, queries + pairs, head, width, weights=heads),
        attention(tokens, keys, queries, pairs, head, width),
        linear("output", tokens, outputs, hidden, width, keeps_input=False, weights=tuple(out_of)),
        norms[1],
    ]
    of_projections = (2 * queries + 2 * pairs) * config.head_dim * hidden
    biases = (inside + hidden) if config.attention_bias else 0
    parameters = int(of_projections + biases) + 2 * hidden + 2 * config.head_dim
    forward, backward = _sequence(config, share)
    if isinstance(config, Qwen3MoeConfig) and layer not in config.dense_layers:
        more, experts, besides = _experts(config, share)
        sent = dispatch(own, config.num_experts, config.experts_per_token, hidden, share.experts, width)
        ops += [*more, *sent.ops]
        parameters += hidden * config.num_experts
        return BlockCost(
            "layer with experts",
            tuple(ops),
            parameters,
            experts,
            _state(config, share),
            3 * _state(config, share) + besides + sent.workspace,
            (*forward, *sent.exchanges),
            (*backward, *sent.backward_exchanges),
        )
    features = config.intermediate_size // tp
    ops += [
        linear(
            "gate, up",
            tokens,
            hidden,
            2 * features,
            width,
            weights=_matrices(("gate_proj", "up_proj"), features, hidden, 0),
        ),
        silu_mul(tokens, features, width, compiled=share.compiled),
        linear(
            "down",
            tokens,
            features,
            hidden,
            width,
            keeps_input=False,
            weights=_matrices(("down_proj",), hidden, features, 1),
        ),
    ]
    parameters += 3 * hidden * features
    again, back = _sequence(config, share)
    return BlockCost(
        "layer",
        tuple(ops),
        parameters,
        0,
        _state(config, share),
        2 * width * tokens * features + 3 * _state(config, share),
        (*forward, *again),
        (*backward, *back),
    )


def _linear(config: AnyQwen3Config, name: str, outputs: int, features: int, cut: int) -> list[Weight]:
    """Weight of a layer of attention, and its bias."""
    weight = Weight(f"{name}.weight", (outputs, features), "linear", cut)
    bias = Weight(f"{name}.bias", (outputs,), cut=0 if cut == 0 else None)
    return [weight, bias] if config.attention_bias else [weight]


def _matrices(names: tuple[str, ...], outputs: int, features: int, cut: int) -> tuple[Weight, ...]:
    """Weights of layers of a feed-forward block."""
    return tuple(Weight(f"ffn.{name}.weight", (outputs, features), "linear", cut) for name in names)


def _sequence(config: AnyQwen3Config, share: Share) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """All-gathers and reduce-scatters of positions around one half of a layer, forward and backward."""
    if share.tensor == 1:
        return (), ()
    size = share.width * share.tokens * config.hidden_size
    pair = (Exchange("all_gather", "tp", size), Exchange("reduce_scatter", "tp", size))
    return pair, pair


def _experts(config: Qwen3MoeConfig, share: Share) -> tuple[list[OpCost], int, float]:
    """Ops of router and experts, parameters of this rank's experts, and bytes of gradients between them."""
    hidden, inside, width = config.hidden_size, config.moe_intermediate_size, share.width
    own = share.tokens / share.tensor
    experts, rows = config.num_experts // share.experts, own * config.experts_per_token
    scores = (Weight("ffn.router.weight", (config.num_experts, hidden)),)
    shapes = {"gate_proj": (hidden, inside), "up_proj": (hidden, inside), "down_proj": (inside, hidden)}
    banks = tuple(Weight(f"ffn.experts.{name}", (experts, *shape), "bank") for name, shape in shapes.items())
    ops = [
        OpCost("ffn input", "memory", kept=width * own * hidden),
        *router(own, hidden, config.num_experts, width, weights=scores),
        permutation(own, rows, hidden, width),
        *grouped_swiglu(rows, hidden, inside, experts, width, compiled=share.compiled, weights=banks),
    ]
    # Of what experts return and get, and of gate and up.
    return ops, 3 * experts * hidden * inside, 2 * width * rows * (hidden + inside)


def _embedding(config: AnyQwen3Config, share: Share) -> BlockCost:
    words, hidden = -(-config.vocab_size // share.tensor), config.hidden_size
    table = Weight("embedding.weight", (words, hidden), "embedding", 0)
    cost = embedding(share.tokens, words, hidden, share.width, weights=(table,))
    size = share.width * share.tokens * hidden
    back = (Exchange("all_gather", "tp", size),) if share.tensor > 1 else ()
    out = (Exchange("reduce_scatter", "tp", size),) if share.tensor > 1 else ()
    return BlockCost("embedding", (cost,), words * hidden, exchanges=out, backward_exchanges=back, is_block=False)


def _classes(name: str, classes: int, hidden: int, share: Share, of_tokens: bool) -> OpCost:
    """Projection of a classifier of tokens, with a bias, or of pooled samples. Each rank of ``tp`` has all of it."""
    weights = [Weight(f"{name}.weight", (classes, hidden))]
    if of_tokens:
        weights.append(Weight(f"{name}.bias", (classes,)))
    rows = share.tokens if of_tokens else share.samples
    return linear("classes", rows, hidden, classes, share.width, weights=tuple(weights))


def _heads(config: AnyQwen3Config, stage: Stage, share: Share) -> BlockCost:
    hidden, width, tokens = config.hidden_size, share.width, share.tokens
    words = -(-config.vocab_size // share.tensor)
    norm = Weight("norm.weight", (hidden,))
    ops: list[OpCost] = [rms_norm("norm", tokens / share.tensor, hidden, width, weights=(norm,))]
    workspace, parameters = 0.0, hidden
    for name, head in config.heads.items():
        if head.kind == "causal_lm":
            owner = "embedding" if config.tie_embeddings else f"heads.{name}"
            projection = (Weight(f"{owner}.weight", (words, hidden), "head", 0),)
            both, besides = linear_cross_entropy(tokens, hidden, words, width, share.memory, weights=projection)
            ops += both
            workspace = max(workspace, besides)
            # A tied head on another stage than the embedding has a copy of its weight.
            parameters += 0 if config.tie_embeddings and stage.is_first else words * hidden
        elif isinstance(head, ClassificationHeadConfig | TokenClassificationHeadConfig):
            of_tokens = isinstance(head, TokenClassificationHeadConfig)
            ops.append(_classes(f"heads.{name}", head.num_classes, hidden, share, of_tokens))
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
