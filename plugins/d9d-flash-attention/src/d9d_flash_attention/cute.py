"""FlashAttention 4 as custom ops of torch, opaque to ``torch.compile``.

The library's functions are Python code that compiles kernels for its arguments, which torch's compiler cannot trace.
This module calls the library's forward and backward in the same way as the library's own autograd function.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head, T = B * S tokens, M largest
number of documents.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.errors import BuildError
from torch import Tensor

#: Environment variable that makes the library cache compiled kernels on disk; the library reads it at import. Without
#: the cache, each process compiles for seconds.
_KEEPS_KERNELS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_FORWARD, _BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    length: int,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Compute attention, see :class:`d9d_flash_attention.backend.Attend`."""
    out: Tensor = forward(query, key, value, starts, length, window, causal)[0]
    return out


def check_library() -> None:
    """Import the library, with its kernel cache on by default, and check that it has the needed functions.

    Raises:
        BuildError: the library lacks a function.
        ImportError: the library cannot be imported.
    """
    os.environ.setdefault(_KEEPS_KERNELS, "1")
    with warnings.catch_warnings():  # deprecation warnings of the library's dependencies
        warnings.simplefilter("ignore", DeprecationWarning)
        library = _library()
    missing = ", ".join(name for name in (_FORWARD, _BACKWARD) if not hasattr(library, name))
    if missing:
        raise BuildError(
            f"kernels.attention: {library.__name__} has no {missing}; install a release of flash-attn-4 that "
            "d9d knows, such as 4.0.0b36, or choose another backend"
        )


@CustomOp.define("d9d_flash_attention::forward")
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    length: int,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Compute attention, and the log-sum-exp that its backward needs.

    The arguments are described in :class:`d9d_flash_attention.backend.Attend`.

    Returns:
        The output, contiguous, in the shape of ``query``; and the log-sum-exp of each query's scores, float32
        [B, N, S], or with ``starts`` [N, T].
    """
    out, sums, *_ = _call(_FORWARD, query, key, value, return_lse=True, **_options(starts, length, window, causal))
    return out, sums


@CustomOp.define("d9d_flash_attention::backward")
def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor | None,
    length: int,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value, contiguous, by the library's backward kernels.

    Args:
        grad: gradient of the output, of any strides.
        query: argument of :func:`forward`.
        key: argument of :func:`forward`.
        value: argument of :func:`forward`.
        out: output that :func:`forward` returned.
        sums: log-sum-exp that :func:`forward` returned.
        starts: argument of :func:`forward`.
        length: argument of :func:`forward`.
        window: argument of :func:`forward`.
        causal: argument of :func:`forward`.
    """
    grads = _contiguous_like(query), _contiguous_like(key), _contiguous_like(value)
    into = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    _call(_BACKWARD, query, key, value, out, grad, sums, **into, **_options(starts, length, window, causal))
    return grads


def _options(starts: Tensor | None, length: int, window: int | None, causal: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": causal}
    if window is not None:  # numbers of positions to the left and right of the query's own
        options |= {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}
    if starts is not None:
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    return options


def _call(name: str, *tensors: Tensor, **options: Any) -> Any:
    # Detached and without gradients: the library reads requires_grad, and must not record an autograd graph.
    with torch.no_grad():
        return getattr(_library(), name)(*(tensor.detach() for tensor in tensors), **options)


def _library() -> Any:
    # Imported here, because it takes seconds and is missing where another version is installed.
    from flash_attn.cute import interface

    return interface


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@forward.register_fake
def _fake(
    query: Tensor,
    _key: Tensor,
    _value: Tensor,
    starts: Tensor | None,
    _length: int,
    _window: int | None,
    _causal: bool,
) -> tuple[Tensor, Tensor]:
    *leading, heads, _ = query.shape
    shape = (leading[0], heads, leading[1]) if starts is None else (heads, leading[0])
    return _contiguous_like(query), torch.empty(shape, dtype=torch.float32, device=query.device)


@backward.register_fake
def _fake_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _contiguous_like(query), _contiguous_like(key), _contiguous_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.length, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _grad_sums: None) -> tuple[Tensor | None, ...]:
    query, key, value, starts, out, sums = ctx.saved_tensors
    if grad is None:
        return (None,) * 7
    grads = backward(grad, query, key, value, out, sums, starts, ctx.length, ctx.window, ctx.causal)
    needed = ctx.needs_input_grad
    return *(one if needed[place] else None for place, one in enumerate(grads)), None, None, None, None


forward.register_autograd(_backward, setup_context=_keep)
