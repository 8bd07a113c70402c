"""Costs of the ops of this package, for cost descriptions of models. Imports no torch.

Traffic assumes fused code: each op reads its inputs and writes its outputs once. All sizes are per rank. ``weights``
are an op's parameters, for predictions of fine-tuning and of optimizers that treat matrices separately.
"""

from __future__ import annotations

from d9d_core.cost import AttentionShape, OpCost, Weight

#: Logits of at most this fraction (1 / 20) of the device's memory are kept for the backward; see
#: :data:`d9d_nn.ops.linear_cross_entropy.KEPT_ELEMENTS`.
_KEPT_PART = 20
#: Largest size of the logits of one chunk, in bytes.
_CHUNK_BYTES = 1 << 30
_FLOAT32 = 4


def linear(
    name: str,
    rows: float,
    features: int,
    outputs: float,
    width: int,
    *,
    keeps_input: bool = True,
    weights: tuple[Weight, ...] = (),
) -> OpCost:
    """Cost of a linear layer, or of several with the same input: one product forward, two backward.

    Args:
        name: name of the op.
        rows: rows of the input.
        features: columns of the input.
        outputs: columns of the output.
        width: bytes of a number.
        keeps_input: whether the input is kept for the backward; false if an earlier op keeps the same tensor.
        weights: parameters of the layers.
    """
    flops = 2 * rows * features * outputs
    traffic = width * (rows * (features + outputs) + features * outputs)
    kept = width * rows * features if keeps_input else 0.0
    return OpCost(name, "product", flops, 2 * flops, traffic, 2 * traffic, kept, rows, weights)


def rms_norm(name: str, rows: float, features: int, width: int, *, weights: tuple[Weight, ...] = ()) -> OpCost:
    """Cost of an RMSNorm of rows, fused with the residual addition before it: reads two inputs, writes sum and norm."""
    size = width * rows * features
    kept = size + _FLOAT32 * rows
    return OpCost(name, "memory", traffic=4 * size, backward_traffic=5 * size, kept=kept, rows=rows, weights=weights)


def rotated_heads(rows: float, heads: float, head_dim: int, width: int, *, weights: tuple[Weight, ...] = ()) -> OpCost:
    """Cost of head norms and rotation of queries and keys; the inputs are kept for the backward."""
    size = width * rows * heads * head_dim
    kept = size + _FLOAT32 * rows * heads
    name = "head norms, rope"
    return OpCost(name, "memory", traffic=2 * size, backward_traffic=3 * size, kept=kept, rows=rows, weights=weights)


def rotation(rows: float, heads: float, head_dim: int, width: int) -> OpCost:
    """Cost of the rotation of queries and keys, whose backward needs only the angles."""
    size = width * rows * heads * head_dim
    return OpCost("rope", "memory", traffic=2 * size, backward_traffic=2 * size, rows=rows)


def attention(
    rows: float, keys: float, query_heads: float, key_value_heads: float, head_dim: int, width: int
) -> OpCost:
    """Cost of fused attention, which keeps queries, keys, values, output and log-sum-exps for the backward.

    The backward recomputes scores: five products instead of two (Dao et al. 2022, "FlashAttention").

    Args:
        rows: number of queries.
        keys: average number of keys that a query attends to.
        query_heads: query heads of this rank.
        key_value_heads: key and value heads of this rank.
        head_dim: features of a head.
        width: bytes of a number.
    """
    flops = 4 * rows * keys * query_heads * head_dim
    size = width * rows * head_dim * (2 * query_heads + 2 * key_value_heads)
    kept = size + _FLOAT32 * rows * query_heads
    shape = AttentionShape(rows, query_heads, key_value_heads, head_dim, width)
    return OpCost("attention", "attention", flops, 2.5 * flops, size, 2 * size, kept, attention=shape)


def silu_mul(rows: float, features: float, width: int, *, compiled: bool) -> OpCost:
    """Cost of ``silu(gate) * up`` in SwiGLU; if compiled, the product is recomputed in the backward instead of kept."""
    size = width * rows * features
    # Without a compiler, silu(gate) and its product with up are also kept, and written and read once more.
    extra = 0 if compiled else 2
    traffic, backward = (3 + extra) * size, (6 + extra) * size
    return OpCost("silu_mul", "memory", traffic=traffic, backward_traffic=backward, kept=(2 + extra) * size)


def embedding(rows: float, words: float, features: int, width: int, *, weights: tuple[Weight, ...] = ()) -> OpCost:
    """Cost of an embedding look-up; the gradient is a dense tensor, which is zeroed and accumulated."""
    size = width * rows * features
    return OpCost(
        "embedding",
        "memory",
        traffic=2 * size,
        backward_traffic=3 * size + 2 * width * words * features,
        kept=8 * rows,
        rows=rows,
        weights=weights,
    )


def linear_cross_entropy(
    rows: float, features: int, words: float, width: int, memory: float, *, weights: tuple[Weight, ...] = ()
) -> tuple[tuple[OpCost, OpCost], float]:
    """Costs of the two ops of linear cross-entropy (projection and loss), and workspace bytes of the backward.

    Logits that fit into 1 / 20 of the device's memory are kept and overwritten by their gradient; logits of other
    tokens are recomputed in the backward, in chunks. With a frozen projection the forward computes the gradient of the
    hidden states, chunk by chunk.

    Args:
        rows: number of predicted tokens.
        features: features of the hidden states.
        words: size of the vocabulary on this rank.
        width: bytes of a number.
        memory: bytes of the device's memory.
        weights: parameters of the projection.
    """
    logits, flops = width * rows * words, 2 * rows * features * words
    kept = min(logits, memory / _KEPT_PART)
    again = 1 - kept / logits if logits else 0.0
    chunk = min(logits - kept, _CHUNK_BYTES)
    # Bytes of the gradients: of the weight, in float32 if chunks are accumulated, and of the hidden states.
    gradient = (_FLOAT32 if chunk else width) * words * features
    product = OpCost(
        "head",
        "product",
        flops,
        (2 + again) * flops,
        width * (rows * features + words * features) + logits,
        2 * width * (rows * features + words * features) + (2 + again) * logits,
        kept + width * rows * features,
        rows,
        weights,
        gradient,
        max(0.0, kept - _CHUNK_BYTES),
    )
    loss = OpCost("loss", "memory", traffic=logits, backward_traffic=2 * logits, kept=(_FLOAT32 + 8) * rows)
    return (product, loss), chunk + gradient + width * rows * features
