"""Backend ``cublas`` of the op ``swiglu``: d9d-triton's backend with products by the measured algorithms.

As in d9d-triton, gate and up share their products in the backward, so a layer has six products for which algorithms are
chosen.
"""

from __future__ import annotations

from d9d_core.kernel import OpSignature
from d9d_triton.joint.swiglu import Swiglu, register
from torch import Tensor

from d9d_cublas import products


class CuBlasProducts:
    """SwiGLU's products by cuBLAS (:mod:`d9d_cublas.products`); see :class:`d9d_triton.joint.swiglu.Products`."""

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """``rows @ weight.T``: [R, K] and [N, K] to [R, N]."""
        return products.forward(rows, weight)

    def rows_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """``grad @ weight``: [R, N] and [N, K] to [R, K]."""
        found: Tensor = products.rows_gradient(grad, weight)
        return found

    def joint_rows_gradient(self, grad: Tensor, weights: list[Tensor]) -> Tensor:
        """:meth:`rows_gradient` of one weight [N, K], the concatenation of ``weights`` along dimension 0."""
        found: Tensor = products.joint_rows_gradient(grad, weights)
        return found

    def weight_gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        """``grad.T @ rows``: [R, N] and [R, K] to [N, K]."""
        found: Tensor = products.weight_gradient(grad, rows)
        return found


#: The backend.
swiglu = register("d9d_cublas::swiglu", CuBlasProducts())


def build(_signature: OpSignature) -> Swiglu:
    """Build the backend ``cublas`` of the op ``swiglu``; its function is the same for every signature."""
    return swiglu
