"""Backend ``quack`` of the op ``grouped_linear``: matrix products over rows that are sorted by expert.

Shapes: R rows, E experts, I features in, O features out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from d9d_core.custom_op import CustomOp
from d9d_core.deferral import Deferral
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_nn.ops.deferred import Product, may_defer, product
from d9d_nn.ops.grouped_linear import autocast_operands, boundaries, clear, packed
from torch import Tensor
from torch.nn import functional

#: Arguments that ``quack.gemm_interface.gemm`` must accept.
_ARGUMENTS = ("cu_seqlens_m", "cu_seqlens_k", "dynamic_scheduler", "tuned")


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``quack`` of ``grouped_linear``; imports the library, so that no step waits for the import.

    Raises:
        BuildError: this release of the library does not support rows of several experts.
        ImportError: the library cannot be imported.
    """
    with warnings.catch_warnings():  # deprecation warnings of the library's dependencies
        warnings.simplefilter("ignore", DeprecationWarning)
        from quack.gemm_interface import gemm
    known = inspect.signature(gemm).parameters
    missing = ", ".join(name for name in _ARGUMENTS if name not in known)
    if missing:
        raise BuildError(
            f"kernels.grouped_linear: quack.gemm_interface.gemm does not take {missing}; install a release of "
            "quack-kernels that d9d knows, such as 0.6.5, or choose another backend"
        )
    return grouped_linear


def grouped_linear(
    x: Tensor, bank: Tensor, counts: Tensor, *, spare_rows: bool = True, deferral: Deferral | None = None
) -> Tensor:
    """Grouped linear map, see :func:`d9d_nn.ops.grouped_linear.grouped_linear`; counts stay on the device."""
    x, bank = autocast_operands(x, bank)
    ends, spare = boundaries(x, counts, spare_rows=spare_rows)
    starts = functional.pad(ends, (1, 0))
    x, bank = packed(x), bank.contiguous()
    if may_defer(bank, deferral):
        assert deferral is not None
        parts = Product(
            forward=lambda x, bank: _forward(x, bank, starts, spare),
            rows_gradient=lambda grad, bank: _rows_gradient(packed(grad), bank, starts, spare),
            weight_gradient=lambda x, grad: _bank_gradient(x, packed(grad), starts),
        )
        return product(x, bank, deferral, parts)
    out: Tensor = _forward(x, bank, starts, spare)
    return out


@CustomOp.define("d9d_quack::grouped_linear")
def _forward(x: Tensor, bank: Tensor, starts: Tensor, spare: Tensor | None) -> Tensor:
    """Multiply rows [R, I] by the matrices [E, I, O] of their experts: [R, O].

    ``starts``: int32 [E + 1], first row of each expert and end of the last; ``spare``: bool [R, 1], true for rows after
    the last expert's, or ``None``.
    """
    return _multiply(x, bank, starts, spare)


# The two gradients are separate custom ops: around a single op, the compiler could not fuse the operations that prepare
# one gradient's inputs with the operations that use the other gradient.
@CustomOp.define("d9d_quack::grouped_linear_rows_gradient")
def _rows_gradient(grad: Tensor, bank: Tensor, starts: Tensor, spare: Tensor | None) -> Tensor:
    """Gradient of rows [R, I], from the gradient of the result [R, O]."""
    return _multiply(grad, bank.mT, starts, spare)


@CustomOp.define("d9d_quack::grouped_linear_bank_gradient")
def _bank_gradient(x: Tensor, grad: Tensor, starts: Tensor) -> Tensor:
    """Gradient of the stacked expert weights [E, I, O]."""
    from quack.gemm_interface import gemm

    # Schedule the tiles dynamically, because experts have unequal numbers of rows.
    out: Tensor = gemm(x.mT, grad, cu_seqlens_k=starts, dynamic_scheduler=True, tuned=False)
    return out


def _multiply(rows: Tensor, matrices: Tensor, starts: Tensor, spare: Tensor | None) -> Tensor:
    # Imported here, because it takes seconds and the conditions of the backend do not need it.
    from quack.gemm_interface import gemm

    return clear(gemm(rows, matrices, cu_seqlens_m=starts, tuned=False), spare)


@_forward.register_fake
def _fake_forward(x: Tensor, bank: Tensor, _starts: Tensor, _spare: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], bank.shape[2])


@_rows_gradient.register_fake
def _fake_rows_gradient(grad: Tensor, bank: Tensor, _starts: Tensor, _spare: Tensor | None) -> Tensor:
    return grad.new_empty(grad.shape[0], bank.shape[1])


@_bank_gradient.register_fake
def _fake_bank_gradient(x: Tensor, grad: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(starts.shape[0] - 1, x.shape[1], grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bank, starts, spare = ctx.saved_tensors
    of_rows, of_bank = ctx.needs_input_grad[:2]
    grad = packed(grad)
    rows_gradient = _rows_gradient(grad, bank, starts, spare) if of_rows else None
    return rows_gradient, _bank_gradient(x, grad, starts) if of_bank else None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
