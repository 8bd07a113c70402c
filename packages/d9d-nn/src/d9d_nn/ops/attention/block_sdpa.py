"""Backend ``sdpa`` of ``attention_block``: the fused kernels of PyTorch's sdpa, where only positions hide keys.

The op is that of :mod:`d9d_parallel.context_parallel.blocks`, which says what its backends compute.

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

#: Above flex: where positions alone hide keys, cuDNN's kernels are faster (2.1 ms where flex takes 3.2, samples of
#: 4 x 4096 on an H200), and their backward computes nothing twice.
PRIORITY = 20


def supports(signature: OpSignature) -> Decision:
    """Accept causal attention without documents and windows, on CUDA in 16 bits."""
    if refusal := partial.refusal(signature):
        return Decision(accept=False, reason=refusal)
    if (window := signature.static.get("window")) is not None:
        return Decision(accept=False, reason=f"computes no windows, here one is {window}")
    if signature.documents:
        return Decision(accept=False, reason="the data packs documents, which it does not tell apart")
    if signature.device == "cpu":
        return Decision(accept=True, reason="by name only on a CPU; documents are an error when it is called")
    if signature.documents is None:
        reason = "by name only where the data does not say whether it packs; documents are an error when it is called"
        return Decision(accept=True, reason=reason)
    reason = "fused, torch picks the kernel; samples are of one document, so it reads no mask"
    return Decision(accept=True, reason=reason, priority=PRIORITY)


def build(signature: OpSignature) -> SdpaBlocks:
    """Backend for this data."""
    return SdpaBlocks(of_one=signature.documents is False)


class SdpaBlocks:
    """SDPA blocks: attention of blocks by fused kernels, in rectangles seen as a whole or up to a diagonal.

    Args:
        of_one: leave documents unread: each sample is one, and no token sees what is behind it.
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
        """List the rectangles: their queries and keys, and whether they are causal.

        Args:
            queries: positions of the queries, in runs.
            keys: positions of the keys, likewise.
            documents: int64 [B, S]; ``None`` if a sample is one document.
            window: number of positions that a query sees, its own included; ``None`` for all.
            device: device of queries and keys.

        Raises:
            JobError: the microbatch has documents, or there is a window.
        """
        if window is not None or (documents is not None and not self._of_one):
            raise JobError(
                "kernels.attention_block: sdpa reads no mask, but the microbatch has documents or the layer a window; "
                "choose flex, or the reference"
            )
        return [(one.queries, one.keys, one.causal) for one in rectangles(queries, keys)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Attend in a rectangle, see :func:`d9d_nn.ops.attention.partial.attend`."""
        return partial.attend(query, key, value, causal=causal)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by a rectangle, see :func:`d9d_nn.ops.attention.partial.attend_backward`."""
        return partial.attend_backward(grad, query, key, value, out, total, causal=causal)
