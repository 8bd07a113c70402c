"""Backend ``flex`` of ``attention``: blocks of the score matrix that nobody sees are skipped (torch FlexAttention).

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from d9d_core.extend import Decision, OpSignature
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_FLOATS = ("bfloat16", "float16", "float32")


def supports(signature: OpSignature) -> Decision:
    """Accept causal attention on CUDA, with priority 0: whether it pays depends on documents, which only calls show."""
    head_dim = signature.static.get("head_dim", 16)
    if signature.device == "cpu":
        return Decision(accept=False, reason="FlexAttention has no backward on the CPU; sdpa has")
    if signature.device != "cuda":
        return Decision(accept=False, reason=f"is compiled for CUDA only, the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(accept=False, reason=f"needs one of {', '.join(_FLOATS)}, the model is {signature.dtype}")
    if not signature.static.get("causal", True):
        return Decision(accept=False, reason="computes causal attention only")
    if head_dim < 16:
        return Decision(accept=False, reason=f"its kernels need head_dim of 16 or more, here it is {head_dim}")
    return Decision(
        accept=True,
        reason="skips blocks outside of documents and windows, no mask of S x S; only by name, as it pays for long "
        "samples of many documents or with windows, and is compiled in the first step",
    )


def build(signature: OpSignature) -> Callable[..., Tensor]:
    """Backend for this device and window; compiled on CUDA, when it is first called."""
    return Flex(signature.static.get("window"), compiled=signature.device == "cuda")


class Flex:
    """Attention by ``flex_attention`` with a block mask.

    Args:
        window: number of positions that a query sees, its own included; ``None`` for all.
        compiled: whether to compile attention and mask; not compiled, all scores exist at once and nothing is skipped.
    """

    def __init__(self, window: int | None, *, compiled: bool) -> None:
        # With torch's symbolic shapes, which take a second and are not needed to refuse.
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self._window = window
        self._attend: Callable[..., Any] = flex_attention
        self._create: Callable[..., BlockMask] = create_block_mask
        if compiled:
            self._attend, self._create = torch.compile(flex_attention), torch.compile(create_block_mask)

    def prepare(self, documents: Tensor | None, length: int, device: torch.device) -> BlockMask:
        """Make the block mask of scores that are seen wholly, partly, or not at all; the same for all heads."""
        window = self._window

        def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
            near = query >= key
            if window is not None:
                near = near & (query - key < window)
            if documents is None:
                return near
            return near & (documents[sample, query] == documents[sample, key])

        samples = None if documents is None else documents.shape[0]
        return self._create(seen, samples, None, length, length, device=device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        """Compute attention, see :func:`d9d_nn.ops.attention.reference.attention`; ``mask`` is from :meth:`prepare`."""
        mixed: Tensor = self._attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            block_mask=mask,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return mixed.transpose(1, 2)
