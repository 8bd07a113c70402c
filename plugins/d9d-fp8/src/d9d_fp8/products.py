"""Product of two quantised matrices: by a GPU kernel, or emulated in float32.

Shapes: M rows of a, N rows of b, K features of both.
"""

from __future__ import annotations

import torch
from d9d_core.custom_op import CustomOp
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from d9d_fp8.quantization import BLOCK, Granularity, Quantized, dequantize

_RECIPES = {
    Granularity.TENSOR: ScalingType.TensorWise,
    Granularity.ROW: ScalingType.RowWise,
    Granularity.TILE: ScalingType.BlockWise1x128,
    Granularity.SQUARE: ScalingType.BlockWise128x128,
}
#: Granularities whose kernels can keep the sum in the tensor core's accumulator. With block scales, each block's sum
#: must be scaled and added in float32 outside of the tensor core.
_FAST = frozenset({Granularity.TENSOR, Granularity.ROW})


def scaled_product(
    a: Quantized, b: Quantized, granularities: tuple[Granularity, Granularity], *, fast: bool, emulate: bool
) -> Tensor:
    """Product ``a @ b.T`` [M, N]: bfloat16, or float32 if it is emulated.

    Args:
        a: [M, K].
        b: [N, K].
        granularities: granularities of a and b.
        fast: sum in the tensor core's own accumulator, with fewer bits than float32. Ignored with block scales, and on
            GPUs other than Hopper.
        emulate: compute in float32, on any device.
    """
    if emulate:
        return dequantize(a) @ dequantize(b).t()
    kinds = [str(granularity) for granularity in granularities]
    product: Tensor = _scaled_mm(a.data, a.scale, kinds[0], b.data, b.scale, kinds[1], fast)
    return product


# A custom op, because torch 2.11 ignores the strides of block scales when it compiles torch's own ``scaled_mm``.
@CustomOp.define("d9d_fp8::scaled_mm")
def _scaled_mm(a: Tensor, a_scale: Tensor, a_kind: str, b: Tensor, b_scale: Tensor, b_kind: str, fast: bool) -> Tensor:
    left, right = Granularity(a_kind), Granularity(b_kind)
    if left is not right and Granularity.TENSOR in (left, right):  # no kernel takes a per-tensor and another scale
        a_scale, b_scale = _by_row(a_scale, len(a)), _by_row(b_scale, len(b))
        left = right = Granularity.ROW
    return functional.scaled_mm(
        a,
        b.t(),
        _left_scale(a_scale, left),
        _RECIPES[left],
        _right_scale(b_scale, right),
        _RECIPES[right],
        output_dtype=torch.bfloat16,
        use_fast_accum=fast and left in _FAST,
    )


@_scaled_mm.register_fake
def _(a: Tensor, _a_scale: Tensor, _a_kind: str, b: Tensor, _b_scale: Tensor, _b_kind: str, _fast: bool) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=torch.bfloat16)


def _by_row(scale: Tensor, rows: int) -> Tensor:
    return scale.expand(rows, 1).contiguous()


def _left_scale(scale: Tensor, granularity: Granularity) -> Tensor:
    """Scale in the layout that the kernel needs for its first operand."""
    return _columns_first(scale) if granularity is Granularity.TILE else scale


def _right_scale(scale: Tensor, granularity: Granularity) -> Tensor:
    """Scale in the layout that the kernel needs for its second, transposed operand."""
    if granularity is Granularity.ROW:
        return scale.t()
    if granularity is Granularity.TILE:
        return _columns_first(scale)
    if granularity is Granularity.SQUARE:
        # cuBLAS needs columns padded to a multiple of four blocks (documentation: "1D and 2D block scaling layouts").
        return functional.pad(scale, (0, -scale.shape[1] % 4), value=1.0).t()
    return scale


def _columns_first(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()


def as_dtype(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a product to another dtype."""
    # In torch 2.11, a compiled autograd function that ends with a cast to the same dtype returns zero gradients.
    return product if product.dtype == dtype else product.to(dtype)


def divisor(granularity: Granularity) -> int:
    """Number of which the sizes of an operand must be multiples."""
    return BLOCK if granularity in (Granularity.TILE, Granularity.SQUARE) else 16
