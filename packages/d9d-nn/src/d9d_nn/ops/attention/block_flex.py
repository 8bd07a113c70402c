"""Backend ``flex`` of ``attention_block``: FlexAttention, which skips keys hidden by documents and windows.

See :mod:`d9d_parallel.context_parallel.blocks` for the op and the functions of its backends.

FlexAttention has no backward that accepts the log-sum-exps of a larger attention, so the backward computes the block
again, with autograd. The block's output gets the gradient of the whole output times the block's weight, and the block's
log-sum-exp gets the remaining gradient (:func:`shares_of`). The second computation is about a third more work, but no
outputs of blocks and no keys of other ranks are kept in memory from the forward.

Shapes: B samples, S positions, Q queries and T keys of the block, N query heads, K key/value heads, D features of a
head.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from d9d_core.attention import MASK_KINDS, Documents, MaskKind, mask_kind
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor

from d9d_nn.ops.attention import block_sdpa, flex, partial
from d9d_nn.ops.attention.block_mask import positions_block_mask
from d9d_nn.ops.attention.flex import compilable, compiled_alone

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: Function from query, key and value [B, heads, positions, D] and a block mask to the output and log-sum-exps.
Attend = Callable[[Tensor, Tensor, Tensor, "BlockMask"], tuple[Tensor, Tensor]]

_log = logging.getLogger("d9d.attention")


def supports(signature: OpSignature) -> Decision:
    """Accept attention on CUDA with all kinds of masks; sdpa is preferred if documents and windows hide nothing."""
    decision = flex.supports(signature)
    if not decision.accept:
        return decision
    window = signature.static.get("window")
    if signature.documents:
        reason = "the data packs documents: skips keys of other documents"
    elif window is not None:
        reason = f"skips keys outside of windows of {window}"
    elif signature.documents is None:
        reason = "skips keys of other documents if microbatches pack them, which the data does not state"
    else:
        reason = "samples are one document each, with no window, so it skips only later keys"
    return Decision(accept=True, reason=f"{reason}; compiled in the first step", priority=flex.PRIORITY)


def build(signature: OpSignature) -> FlexBlocks:
    """Build the backend for a signature; its function is compiled in its first call."""
    of_one = signature.documents is False and mask_kind(signature.static) == "causal"
    # sdpa computes calls in which neither documents nor a window hide keys, because it is faster. If no call can have
    # documents, flex computes all calls: it was chosen by name, or because sdpa refuses.
    plain = partial.refusal(signature) is None and not of_one
    return FlexBlocks(
        _compiled_attention(),
        of_one=of_one,
        plain=block_sdpa.SdpaBlocks(of_one=True) if plain else None,
        shares=_Compiled(shares_of),  # compiled, it is one pass over memory instead of ten
    )


class FlexBlocks:
    """FlexAttention blocks: ``flex_attention`` of a rank's queries with a block of keys, with block masks.

    Args:
        attend: function that computes attention to a block of keys, and its log-sum-exps.
        of_one: whether to ignore documents: each sample is one document, and no token sees the padding after it.
        plain: function for calls without documents and windows; by default ``attend``.
        shares: :func:`shares_of`, possibly compiled.

    Attributes:
        mask_kinds: kinds of masks that the function computes: all.
    """

    mask_kinds = MASK_KINDS

    def __init__(
        self,
        attend: Attend,
        *,
        of_one: bool,
        plain: block_sdpa.SdpaBlocks | None = None,
        shares: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._attend = attend
        self._of_one = of_one
        self._plain = plain
        self._shares = shares_of if shares is None else shares

    def prepare(
        self,
        queries: Sequence[range],
        keys: Sequence[range],
        documents: Documents,
        window: int | None,
        device: torch.device,
        *,
        mask: MaskKind = "causal",
    ) -> Sequence[tuple[slice, slice, BlockMask | bool]]:
        """Make the block mask of all queries and all keys, so that the compiled function always gets one shape.

        If neither documents nor a window hide keys, and ``plain`` was given, ``plain`` prepares its own calls.

        Args:
            queries: positions of the queries, as contiguous ranges.
            keys: positions of the keys, as contiguous ranges.
            documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.
            window: number of positions that a query sees, including its own; ``None`` for all.
            device: device of queries and keys.
            mask: kind of the mask.

        Returns:
            For each call, the slice of the queries, the slice of the keys, and the mask. FlexAttention needs one call,
            or none if positions and window hide all keys; ``plain`` may need several.
        """
        if self._of_one:
            documents = None
        if mask == "causal":  # for other masks, queries also see later keys or their own block
            # a window of this size hides nothing
            behind = max(run.stop for run in queries) - min(run.start for run in keys)
            window = None if window is not None and window >= behind else window
        if documents is None and window is None and self._plain is not None:
            return self._plain.prepare(queries, keys, None, None, device)
        if mask == "causal" and not any(_sees(run, other, window) for run in queries for other in keys):
            return []
        blocks = positions_block_mask(documents, queries, keys, window, device, mask=mask)
        return [(slice(0, blocks.shape[-2]), slice(0, blocks.shape[-1]), blocks)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | bool) -> tuple[Tensor, Tensor]:
        """Attend to the keys of a block.

        Args:
            query: [B, Q, N, D].
            key: [B, T, K, D].
            value: [B, T, K, D].
            mask: from :meth:`prepare`.

        Returns:
            Output [B, Q, N, D], and logarithm of the sum of exponentials of the visible scores [B, Q, N], minus
            infinity if no score is visible.
        """
        if isinstance(mask, bool):
            assert self._plain is not None
            return self._plain(query, key, value, mask)
        with torch.enable_grad():  # so that one compilation gives the backward's kernels, too
            out, total = self._attend(*_leaves(query, key, value), mask)
        return out.detach().transpose(1, 2), total.detach().transpose(1, 2)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        total: Tensor,
        mask: BlockMask | bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of queries, keys and values from one block of a larger attention.

        Args:
            grad: gradient of the larger attention's output, [B, Q, N, D].
            query: [B, Q, N, D].
            key: keys of this block, [B, T, K, D].
            value: values of this block, [B, T, K, D].
            out: output of the larger attention, [B, Q, N, D].
            total: log-sum-exp of each query's scores over all keys of the larger attention, [B, Q, N].
            mask: from :meth:`prepare`.

        Returns:
            Gradients of query, key and value, in their dtypes.
        """
        if isinstance(mask, bool):
            assert self._plain is not None
            return self._plain.backward(grad, query, key, value, out, total, mask)
        leaves = _leaves(query, key, value)
        with torch.enable_grad():
            part, of_part = self._attend(*leaves, mask)
        given = (grad.transpose(1, 2), part.detach(), of_part.detach(), out.transpose(1, 2), total.transpose(1, 2))
        with torch.no_grad():
            shares = self._shares(*given)
        grads = torch.autograd.grad((part, of_part), leaves, shares)
        of_query, of_key, of_value = (tensor.transpose(1, 2) for tensor in grads)
        return of_query, of_key, of_value


def shares_of(grad: Tensor, part: Tensor, of_part: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a block's output and log-sum-exps from the gradient of a larger attention.

    Args:
        grad: gradient of the larger attention's output, [B, N, Q, D].
        part: output of the block, [B, N, Q, D].
        of_part: log-sum-exp of each query's scores in the block, [B, N, Q].
        out: output of the larger attention, [B, N, Q, D].
        total: log-sum-exp of each query's scores over all keys of the larger attention, [B, N, Q].

    Returns:
        Gradient of ``part`` in the dtype of ``grad``, and of ``of_part`` in the dtype of ``of_part``.
    """
    wide, weight = grad.to(of_part.dtype), (of_part - total).exp()  # zero for a query that sees none of these keys
    of_out = (wide * weight.unsqueeze(-1)).to(grad.dtype)
    # Kernels subtract rowsum(part * its gradient) from the gradient of each probability, but here rowsum(out * grad) of
    # the larger attention is needed. The gradient of the log-sum-exp adds the difference, rounded as the kernels do.
    own = (of_out.to(wide.dtype) * part.to(wide.dtype)).sum(-1)
    return of_out, own - weight * (wide * out.to(wide.dtype)).sum(-1)


def _compiled_attention() -> _Compiled:
    """Compile ``flex_attention`` as a function that also returns log-sum-exps."""
    # Imported late: this imports torch's symbolic shapes, which takes a second and is not needed to refuse.
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor | None]:
        grouped, request = query.shape[1] != key.shape[1], AuxRequest(lse=True)
        out, more = flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped, return_aux=request)
        return out, more.lse

    return _Compiled(attend)


class _Compiled:
    """Wrapper that compiles its function in the first call, separately from the caller.

    Args:
        function: function of tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__name__
        self._function: Callable[..., tuple[Tensor, Tensor]] = compiled_alone(function)
        self._called = False

    def __call__(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        # Compile even if a caller forces eager mode, because uncompiled attention holds all scores in memory.
        with compilable(), torch.compiler.set_stance("default"):
            found = self._function(*inputs)
        if not self._called:
            self._called = True
            _log.info("compiling attention (flex, blocks, %s): %.1f s", self._name, time.perf_counter() - started)
        return found


def _leaves(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [B, S, heads, D] as [B, heads, S, D], detached from the autograd graph."""
    heads = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in (query, key, value)]
    return heads[0], heads[1], heads[2]


def _sees(queries: range, keys: range, window: int | None) -> bool:
    """Whether positions and window let at least one query see at least one key."""
    near = window is None or queries.start - (keys.stop - 1) < window
    return near and queries.stop > keys.start
