"""Backend ``sdpa`` of ``attention``: PyTorch's fused scaled dot product attention.

Shapes: B samples, S positions, N query heads, K key/value heads (N = K * G), D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable

from d9d_core.ops import Decision, OpSignature
from torch import Tensor
from torch.nn import functional

from d9d_nn.ops.attention import visible

_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


def supports(signature: OpSignature) -> Decision:
    """Accept causal attention in any floating-point dtype, on any device."""
    if signature.dtype not in _FLOATS:
        return Decision(
            accept=False, reason=f"needs one of {', '.join(sorted(_FLOATS))}, the model is {signature.dtype}"
        )
    if not signature.static.get("causal", True):
        return Decision(accept=False, reason="computes causal attention only")
    return Decision(
        accept=True,
        reason="fused; with documents it reads a mask of S x S per sample, without them none",
        priority=10,
    )


def build(signature: OpSignature) -> Callable[..., Tensor]:
    """The function for this device."""
    # On CUDA, the flash and cuDNN kernels read grouped heads, those that take a mask do not; on CPU all do.
    grouped_with_mask = signature.device == "cpu"

    def sdpa(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        groups = query.shape[2] // key.shape[2]
        grouped = groups > 1 and (documents is None or grouped_with_mask)
        if groups > 1 and not grouped:
            key, value = _repeat(key, groups), _repeat(value, groups)
        mask = None if documents is None else visible(query.shape[1], documents, query.device)[:, None]
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=grouped,
        )
        return mixed.transpose(1, 2)

    return sdpa


def _repeat(heads: Tensor, groups: int) -> Tensor:
    """[B, S, K, D] -> [B, S, K * G, D], each head G times in a row."""
    return heads.repeat_interleave(groups, dim=2)
