"""Kernels with one fault each, of the op rms_norm (which is taken from d9d-nn)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from d9d_core.kernel import Decision, OpSignature
from d9d_testing.suites.kernel import KernelSuite
from torch import Tensor
from torch.nn import functional


def sound(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


class _ForgetsTheMean(torch.autograd.Function):
    """The gradient of x as if its root mean square were constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        to_weight = (grad * x * scale).reshape(-1, x.shape[-1]).sum(0)
        return (grad * scale * weight).to(x.dtype), to_weight.to(weight.dtype), None


class _SoundForward(torch.autograd.Function):
    """Forward of the reference, for a faulty backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return sound(x, weight, eps)


class _NeedsAPlainGradient(_SoundForward):
    """Reads memory of the gradient as if it were contiguous."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        if not grad.is_contiguous():
            grad = torch.zeros_like(grad)
        with torch.enable_grad():
            out = sound(x, weight, ctx.eps)
        return (*torch.autograd.grad(out, (x, weight), grad), None)  # type: ignore[return-value]


class _ReusesItsOutput(torch.autograd.Function):
    """Writes each output of a shape to the same memory."""

    memory: ClassVar[dict[Any, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out = sound(x, weight, eps)
        return _ReusesItsOutput.memory.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return (*_gradients(ctx, grad), None)  # type: ignore[return-value]


class _WritesIntoTheGradient(_SoundForward):
    """Scales the incoming gradient in place, where another consumer may still read it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        found = _gradients(ctx, grad.clone())
        grad.contiguous().mul_(0.5)
        return (*found, None)  # type: ignore[return-value]


class _SumsTheWeightNarrowly(_SoundForward):
    """Adds up the gradient of the weight row by row, in its own dtype."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        to_x, _ = _gradients(ctx, grad)
        x, weight = ctx.saved_tensors
        scaled = sound(x, torch.ones_like(weight), ctx.eps) * grad
        total = torch.zeros_like(weight)
        for row in scaled.reshape(-1, x.shape[-1]):
            total += row.to(weight.dtype)
        return to_x, total, None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
    with torch.enable_grad():
        out = sound(x, weight, ctx.eps)
    return torch.autograd.grad(out, (x, weight), grad)


def wrong_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return sound(x, weight, 0.1)


def narrow(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).bfloat16() * weight.to(x.dtype)


def widens(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return sound(x.float(), weight.float(), eps)


def in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = sound(x, weight, eps)
    x.data.mul_(2)
    return out


def even_rows_only(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1] // 8 * 8 or x.shape[-1]
    out = sound(x[..., :width], weight[:width], eps)
    return functional.pad(out, (0, x.shape[-1] - width))


def as_if_contiguous(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not x.is_contiguous():
        x = x.as_strided(x.shape, torch.empty(x.shape).stride())
    return sound(x, weight, eps)


def no_weight_gradient(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return sound(x, weight.detach(), eps)


def one_row_less(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.cat([sound(x[:-1], weight, eps), x[-1:]]) if len(x) > 3 else sound(x, weight, eps)


def detaches_frozen(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Only differentiable where everything is."""
    return sound(x, weight, eps) if x.requires_grad and weight.requires_grad else sound(x, weight, eps).detach()


def overflows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Only for inputs that normal numbers do not reach."""
    return torch.where(x.abs() > 100, torch.inf, sound(x, weight, eps))


def fails_without_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert len(x), "no rows"
    return sound(x, weight, eps)


class Sound(KernelSuite):
    target = "rms_norm.faulty"
    dtypes = ("float32", "bfloat16")

    def function(self, signature: OpSignature) -> Callable[..., Any]:
        return self.compute_with

    compute_with = staticmethod(sound)
    named: ClassVar[tuple[str, ...]] = ("acme.rms_norm", "aten.rsqr?")

    def operators(self) -> tuple[str, ...]:
        return self.named

    def decision(self, signature: OpSignature) -> Any:
        accepted = signature.dtype in ("float32", "bfloat16", "float16")
        return Decision(accepted, "runs everywhere" if accepted else f"no {signature.dtype}")


def _fault(function: Callable[..., Tensor], text: str) -> tuple[dict[str, Any], str]:
    return {"compute_with": staticmethod(function)}, text


def _answers(answer: Callable[[OpSignature], Any], text: str) -> tuple[dict[str, Any], str]:
    return {"decision": lambda _self, signature: answer(signature)}, text


FAULTS = {
    "other constant": _fault(wrong_eps, ""),
    "computes too narrow": _fault(narrow, ""),
    "returns a wider dtype": _fault(widens, "the output is"),
    "writes into its input": _fault(in_place, ""),
    "leaves out the rest of odd rows": _fault(even_rows_only, "x [7, 33]"),
    "takes inputs for contiguous": _fault(as_if_contiguous, "inputs that are not contiguous"),
    "no gradient of the weight": _fault(no_weight_gradient, "no gradient of weight"),
    "leaves out the last row": _fault(one_row_less, "x [7, 33]"),
    "gradient forgets the mean": _fault(_ForgetsTheMean.apply, "random gradient: x"),
    "takes gradients for contiguous": _fault(_NeedsAPlainGradient.apply, "expanded gradient"),
    "frozen inputs break it": _fault(detaches_frozen, ""),
    "overflows for large inputs": _fault(overflows, ""),
    "reuses the memory of its output": _fault(_ReusesItsOutput.apply, ""),
    "writes into the gradient": _fault(_WritesIntoTheGradient.apply, ""),
    "sums the weight's gradient in its dtype": _fault(_SumsTheWeightNarrowly.apply, ""),
    "fails without rows": _fault(fails_without_rows, "no rows"),
    "accepts everything": _answers(lambda _s: Decision(True, "runs everywhere"), "supports() accepts"),
    "refuses without a reason": _answers(
        lambda s: Decision(s.dtype == "float32", "yes" if s.dtype == "float32" else ""), "gives no reason"
    ),
    "answers by raising": _answers(lambda s: Decision(bool({"float32": 1, "bfloat16": 1}[s.dtype]), "yes"), "KeyError"),
    "names operators that it does not run": ({"named": ("acme.rms_norm",)}, "none of its record's acme.rms_norm"),
    "answers with a bool": _answers(lambda s: s.dtype == "float32", "bool"),
}
