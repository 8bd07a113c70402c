"""Backend ``lean`` of the op ``silu_mul``: the backward recomputes the sigmoid instead of keeping it.

Shapes: ... any leading dims, I features of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor

_DTYPES = ("float32", "bfloat16", "float16")


def supports(signature: OpSignature) -> Decision:
    """Decide by a signature whether this backend can run; the accepting backend with the highest priority is chosen.

    Priority 0: chosen only if a job file names it, as ``kernels: {silu_mul: lean}``.
    """
    if signature.dtype not in _DTYPES:
        return Decision(False, f"supports {', '.join(_DTYPES)}, not {signature.dtype}")
    return Decision(True, "runs on every device", priority=0)


def build(signature: OpSignature) -> Callable[[Tensor, Tensor], Tensor]:  # noqa: ARG001 - the same for all signatures
    """Function that replaces the op's reference."""
    return silu_mul


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gate * sigmoid(gate) * up``: [..., I], [..., I] -> [..., I] in the dtype of the arguments."""
    out: Tensor = _SiluMul.apply(gate, up)
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.float() for tensor in ctx.saved_tensors)
        sigmoid, wide = torch.sigmoid(gate), grad.float()
        grad_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
        return grad_gate.to(grad.dtype), (wide * gate * sigmoid).to(grad.dtype)
