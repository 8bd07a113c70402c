"""Attention to some of the keys by PyTorch's fused kernels, with the log-sum-exps that combine such partial results.

The keys are divided into parts. The output of attention to all keys is the sum of the parts' outputs, each weighted by
``exp(its log-sum-exp - log-sum-exp over all keys)`` (Dao et al. 2022, "FlashAttention", section 3.1). The backward of a
part needs the output and the log-sum-exps of the attention to all keys, and nothing from other parts (section B.2).

Shapes: B samples, Q queries and T keys of the part, N query heads, K key/value heads (N = K * G), D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from d9d_core.kernel import OpSignature
from torch import Tensor
from torch.nn.attention import SDPBackend

#: Largest number of features of a head in the flash kernels; torch uses cuDNN's kernels up to 128 or more.
_WIDEST_HEAD = 256
_HEAD_MULTIPLE = 8
_CUDA_FLOATS = ("bfloat16", "float16")
_CPU_FLOATS = ("bfloat16", "float16", "float32", "float64")


def refusal(signature: OpSignature) -> str | None:
    """Reason why the kernels cannot compute parts of causal attention; ``None`` if they can."""
    head_dim = signature.static.get("head_dim")
    if signature.device not in ("cuda", "cpu"):
        return f"its kernels run on CUDA and CPU, the device is {signature.device}"
    floats = _CUDA_FLOATS if signature.device == "cuda" else _CPU_FLOATS
    if signature.dtype not in floats:
        return f"needs one of {', '.join(floats)} on {signature.device}, the model is {signature.dtype}"
    if not signature.static.get("causal", True):
        return "computes causal attention only"
    if signature.device == "cuda" and head_dim is not None and (head_dim > _WIDEST_HEAD or head_dim % _HEAD_MULTIPLE):
        return f"needs head_dim up to {_WIDEST_HEAD}, a multiple of {_HEAD_MULTIPLE}; here it is {head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rectangle of the score matrix in which queries see all keys, or keys up to their own position.

    Attributes:
        queries: slice of its queries.
        keys: slice of its keys.
        causal: whether query n sees only keys 0 to n, with as many keys as queries; otherwise each query sees all keys.
    """

    queries: slice
    keys: slice
    causal: bool


def rectangles(queries: Sequence[range], keys: Sequence[range]) -> list[Rectangle]:
    """List rectangles that cover all visible scores of a causal mask without documents and windows.

    Args:
        queries: positions of the queries, as contiguous ranges in ascending order that do not overlap.
        keys: positions of the keys, as contiguous ranges in ascending order. Each range of queries lies in one range of
            keys, or overlaps none.

    Raises:
        ValueError: a range of queries overlaps a range of keys only partly.
    """
    if list(queries) == list(keys):
        whole = slice(0, sum(len(run) for run in queries))
        return [Rectangle(whole, whole, causal=True)]
    found: list[Rectangle] = []
    row = 0
    for run in queries:
        rows, before, column = slice(row, row + len(run)), 0, 0
        for other in keys:
            before += len(range(other.start, min(other.stop, run.start)))
            if other.start < run.stop and run.start < other.stop:
                if not (other.start <= run.start and run.stop <= other.stop):
                    raise ValueError(
                        f"the query positions {run} overlap the key positions {other} only partly; split the ranges"
                    )
                own = column + run.start - other.start
                found.append(Rectangle(rows, slice(own, own + len(run)), causal=True))
            column += len(other)
        if before:
            # One call computes neighbouring ranges of queries that see the same keys.
            last = next((one for one in found if not one.causal and one.queries.stop == row), None)
            if last is not None and last.keys.stop == before:
                found.remove(last)
                rows = slice(last.queries.start, rows.stop)
            found.append(Rectangle(rows, slice(0, before), causal=False))
        row += len(run)
    return found


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention to a part of the keys with torch's fastest kernel. Not recorded by autograd.

    Args:
        query: [B, Q, N, D].
        key: [B, T, K, D].
        value: [B, T, K, D].
        causal: whether query n sees only keys 0 to n, with T = Q; otherwise each query sees all keys.

    Returns:
        Output [B, Q, N, D], and log-sum-exp of each query's scores over these keys, [B, Q, N], float32 or wider.
    """
    heads = _heads(query), _heads(key), _heads(value)
    if query.device.type == "cpu":
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal)  # noqa: SLF001
    elif _prefers_cudnn(*heads, causal=causal):
        out, total, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal)  # noqa: SLF001
        total = total.view(total.shape[:3])  # [B, N, Q] or [B, N, Q, 1]
    else:
        out, total, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, causal)  # noqa: SLF001
    return out.transpose(1, 2), total.transpose(1, 2)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients that one part of the keys contributes to the backward of attention to all keys.

    Args:
        grad: gradient of the output of attention to all keys, [B, Q, N, D].
        query: [B, Q, N, D].
        key: keys of this part, [B, T, K, D].
        value: values of this part, [B, T, K, D].
        out: output of attention to all keys, [B, Q, N, D].
        total: log-sum-exp of each query's scores over all keys, [B, Q, N].
        causal: whether query n sees only keys 0 to n of this part, with T = Q; otherwise each query sees all T keys.

    Returns:
        Gradients of query [B, Q, N, D], key and value [B, T, K, D], in their dtypes. The parts' gradients of ``query``
        must be added up.
    """
    heads = _heads(query), _heads(key), _heads(value)
    if grad.stride() != out.stride() or out.stride(-1) != 1:  # cuDNN needs output and gradient in one layout
        grad, out = grad.contiguous(), out.contiguous()
    both = _heads(grad), _heads(out)
    if query.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
        grads = backward(both[0], *heads, both[1], total.contiguous().transpose(1, 2), 0.0, causal)
    else:
        # Without dropout the state of the random generator is not used, but its dtype is checked.
        sums, state = total.transpose(1, 2).contiguous(), query.new_empty((), dtype=torch.int64)
        lengths = (None, None, query.shape[1], key.shape[1])
        if _prefers_cudnn(*heads, causal=causal):
            backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward  # noqa: SLF001
            kept = (both[1], sums.unsqueeze(-1), state, state, None)
            grads = backward(both[0], *heads, *kept, *lengths, 0.0, causal)
        else:
            backward = torch.ops.aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001
            state = query.new_empty(2, dtype=torch.uint64)
            grads = backward(both[0], *heads, both[1], sums, *lengths, 0.0, causal, state, state)
    of_query, of_key, of_value = grads
    return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)


def _heads(tensor: Tensor) -> Tensor:
    """Heads [B, S, heads, D] as [B, heads, S, D], with stride 1 along the features, which fused kernels need."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).transpose(1, 2)


def _prefers_cudnn(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
    """Whether torch would use cuDNN's kernel for these heads [B, N, Q, D]; does not wait for the device."""
    grouped = query.shape[1] != key.shape[1]
    # The function is private, so a test checks it; no public function returns torch's choice.
    choice = torch._fused_sdp_choice(query, key, value, is_causal=causal, enable_gqa=grouped)  # noqa: SLF001
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)
