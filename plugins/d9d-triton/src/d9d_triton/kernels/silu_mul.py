"""Kernels of SiLU-mul, see :mod:`d9d_triton.silu_mul`."""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.launcher import Launcher


@Launcher
@triton.jit
def gate_rows(
    out,
    gate,
    up,
    features,
    gate_row,
    gate_feature,
    up_row,
    up_feature,
    BLOCK: tl.constexpr,
):
    """SiLU-mul kernel: ``silu(gate) * up`` over a block of one row.

    Args:
        out: [R, I], out, contiguous.
        gate: [R, I].
        up: [R, I].
        features: I.
        gate_row: stride of the gate in dimension 0.
        gate_feature: stride of the gate in dimension 1.
        up_row: stride of up in dimension 0.
        up_feature: stride of up in dimension 1.
        BLOCK: features of one program.
    """
    row, feature = _place(features, BLOCK)
    there = feature < features
    x = tl.load(gate + row * gate_row + feature * gate_feature, there, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + feature * up_feature, there, other=0.0).to(tl.float32)
    tl.store(out + row * features + feature, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), there)


@Launcher
@triton.jit
def differentiate(
    grad_gate,
    grad_up,
    gated,
    grad,
    gate,
    up,
    features,
    grad_gate_row,
    grad_up_row,
    grad_row,
    grad_feature,
    gate_row,
    gate_feature,
    up_row,
    up_feature,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """SiLU-mul kernel: gradients of :func:`gate_rows` from the gradient of its output.

    Args:
        grad_gate: [R, I], out; contiguous features.
        grad_up: [R, I], out; contiguous features.
        gated: [R, I], out, contiguous: the forward's output, recomputed; unused without ``GATED``.
        grad: [R, I], gradient of the output.
        gate: [R, I].
        up: [R, I].
        features: I.
        grad_gate_row: stride of ``grad_gate`` in dimension 0.
        grad_up_row: stride of ``grad_up`` in dimension 0.
        grad_row: stride of ``grad`` in dimension 0.
        grad_feature: stride of ``grad`` in dimension 1.
        gate_row: stride of the gate in dimension 0.
        gate_feature: stride of the gate in dimension 1.
        up_row: stride of up in dimension 0.
        up_feature: stride of up in dimension 1.
        BLOCK: features of one program.
        GATED: whether to recompute the forward's output.
    """
    row, feature = _place(features, BLOCK)
    there = feature < features
    arrived = tl.load(grad + row * grad_row + feature * grad_feature, there, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_row + feature * gate_feature, there, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + feature * up_feature, there, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(x)
    silu = x * sigmoid
    of_gate = arrived * y * (sigmoid + silu * (1.0 - sigmoid))
    of_up = arrived * silu
    tl.store(grad_gate + row * grad_gate_row + feature, of_gate.to(grad_gate.dtype.element_ty), there)
    tl.store(grad_up + row * grad_up_row + feature, of_up.to(grad_up.dtype.element_ty), there)
    if GATED:
        tl.store(gated + row * features + feature, (silu * y).to(gated.dtype.element_ty), there)


@triton.jit
def _place(features, BLOCK: tl.constexpr):
    """Row of this program, and its feature indices int64 [BLOCK]."""
    blocks = tl.cdiv(features, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    return program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)
