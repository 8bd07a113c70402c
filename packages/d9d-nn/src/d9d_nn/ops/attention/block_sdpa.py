"""Backend ``sdpa`` of ``attention_block``: the fused kernels of PyTorch's sdpa, if only positions hide keys.

See :mod:`d9d_parallel.context_parallel.blocks` for the op and the functions of its backends.

Shapes: B samples, S positions, Q queries and T keys of the block, N query heads, K key/value heads, D features of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from d9d_core.errors import JobError
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor

from d9d_nn.ops.attention import partial
from d9d_nn.ops.attention.partial import rectangles

#: Priority of this backend, above flex: if only positions hide keys, cuDNN's kernels are faster (2.1 ms, flex 3.2 ms,
#: with 4 samples of 4096 positions on an H200), and their backward computes nothing twice.
PRIORITY = 20


def supports(signature: OpSignature) -> Decision:
    """Accept causal attention without documents and windows, on CUDA in 16 bits, and on a CPU if a job names it."""
    if refusal := partial.refusal(signature):
        return Decision(accept=False, reason=refusal)
    if (window := signature.static.get("window")) is not None:
        return Decision(accept=False, reason=f"does not compute windows, here one is {window}")
    if signature.documents:
        return Decision(accept=False, reason="the data packs documents, which it cannot separate")
    if signature.device == "cpu":
        return Decision(accept=True, reason="on a CPU used only if the job names it; a call with documents is an error")
    if signature.documents is None:
        reason = (
            "used only if the job names it, because the data does not state whether it packs documents; a call with "
            "documents is an error"
        )
        return Decision(accept=True, reason=reason)
    reason = "fused, torch chooses the kernel; samples are one document each, so it needs no mask"
    return Decision(accept=True, reason=reason, priority=PRIORITY)


def build(signature: OpSignature) -> SdpaBlocks:
    """Build the backend function; the signature states whether the data has documents."""
    return SdpaBlocks(of_one=signature.documents is False)


class SdpaBlocks:
    """SDPA blocks: attention of blocks by fused kernels, in rectangles of the score matrix without a mask.

    The queries of a rectangle see all its keys, or the keys up to their own position.

    Args:
        of_one: whether to ignore documents: each sample is one document, and no token sees the padding after it.
    """

    def __init__(self, *, of_one: bool) -> None:
        self._of_one = of_one

    def prepare(
        self,
        queries: Sequence[range],
        keys: Sequence[range],
        documents: Tensor | None,
        window: int | None,
        device: torch.device,  # noqa: ARG002
    ) -> list[tuple[slice, slice, bool]]:
        """List the rectangles of a block, each with its queries and keys and whether it is causal.

        Args:
            queries: positions of the queries, as contiguous ranges.
            keys: positions of the keys, as contiguous ranges.
            documents: int64 [B, S]; ``None`` if a sample is one document.
            window: number of positions that a query sees, including its own; ``None`` for all.
            device: device of queries and keys.

        Raises:
            JobError: the microbatch has documents, or there is a window.
        """
        if window is not None or (documents is not None and not self._of_one):
            raise JobError(
                "kernels.attention_block: sdpa has no mask, but samples hold several documents or the layer has a "
                "sliding window; choose flex, or the reference"
            )
        return [(one.queries, one.keys, one.causal) for one in rectangles(queries, keys)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Compute attention in a rectangle, see :func:`d9d_nn.ops.attention.partial.attend`."""
        return partial.attend(query, key, value, causal=causal)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a rectangle, see :func:`d9d_nn.ops.attention.partial.attend_backward`."""
        return partial.attend_backward(grad, query, key, value, out, total, causal=causal)
