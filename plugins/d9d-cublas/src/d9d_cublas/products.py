"""Matrix products on all devices of a process; the backward products are custom ops, opaque to the compiler.

Shapes: T rows, N features out, K features in.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from d9d_core.custom_op import CustomOp
from d9d_triton.joint.products import stacked
from torch import Tensor

from d9d_cublas.binding import Functions, LibraryError, find_library
from d9d_cublas.choices import Choices, cache_file
from d9d_cublas.device import DeviceProducts, is_capturing
from d9d_cublas.library import Library
from d9d_cublas.problem import fits, multiply, shape_of
from d9d_cublas.tuning import Tuner


class Multiplies(Protocol):
    """Matrix products of one device, such as :class:`~d9d_cublas.device.DeviceProducts`."""

    def multiply(self, layout: str, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Compute a matrix product of two operands in a layout."""


class Products:
    """Computes matrix products by cuBLAS on all devices of a process.

    Args:
        open_device: called at the first product on a device; returns the object that computes the device's products, or
            ``None`` to let torch compute them.
        capturing: returns whether a CUDA graph is being captured, during which no device is opened.
    """

    def __init__(
        self,
        open_device: Callable[[torch.device], Multiplies | None],
        capturing: Callable[[], bool] = is_capturing,
    ) -> None:
        self._open = open_device
        self._capturing = capturing
        self._devices: dict[torch.device, Multiplies | None] = {}
        self._lock = threading.Lock()

    def multiply(self, layout: str, first: Tensor, second: Tensor) -> Tensor:
        """Compute a matrix product by cuBLAS; torch multiplies operands that the library does not support.

        Args:
            layout: one of :data:`~d9d_cublas.problem.LAYOUTS`.
            first: first operand.
            second: second operand.
        """
        out = first.new_empty(shape_of(layout, first, second))
        device = self._of(first.device) if fits(first, second) else None
        if device is None:
            multiply(layout, first, second, out)
        else:
            device.multiply(layout, first, second, out)
        return out

    def _of(self, device: torch.device) -> Multiplies | None:
        if device in self._devices:  # without the lock: entries only come
            return self._devices[device]
        with self._lock:
            if device not in self._devices:
                if self._capturing():
                    return None
                self._devices[device] = self._open(device)
            return self._devices[device]


def open_device(device: torch.device) -> DeviceProducts | None:
    """Products by cuBLASLt on a CUDA device; ``None``, after a warning, if the library is not available."""
    if device.type != "cuda":
        return None
    try:
        library = Library(Functions(find_library()), device)
    except (LibraryError, OSError, AttributeError) as error:
        text = f"torch computes the products of swiglu.cublas, because cuBLASLt is not available on {device}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None
    return DeviceProducts(library, torch.cuda.get_device_name(device), Choices(cache_file()), Tuner())


#: Global, because torch registers custom ops for the whole process.
_PRODUCTS = Products(open_device)


def forward(rows: Tensor, weight: Tensor) -> Tensor:
    """Product of rows with a weight, ``rows @ weight.T``; not a custom op, because it runs inside of one.

    Args:
        rows: [T, K].
        weight: [N, K].

    Returns:
        [T, N].
    """
    return _PRODUCTS.multiply("forward", rows, weight)


@CustomOp.define("d9d_cublas::rows_gradient")
def rows_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the rows of :func:`forward`, ``grad @ weight``.

    Args:
        grad: [T, N].
        weight: [N, K].

    Returns:
        [T, K].
    """
    return _PRODUCTS.multiply("rows_gradient", grad, weight)


@CustomOp.define("d9d_cublas::joint_rows_gradient")
def joint_rows_gradient(grad: Tensor, weights: list[Tensor]) -> Tensor:
    """Gradient of the rows of several forward products, computed in one product with the concatenated weights.

    Args:
        grad: [T, N].
        weights: weights of the products, [N_i, K] each, where the N_i add up to N.

    Returns:
        [T, K].
    """
    return _PRODUCTS.multiply("rows_gradient", grad, stacked(weights))


@CustomOp.define("d9d_cublas::weight_gradient")
def weight_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    """Gradient of the weight of :func:`forward`, ``grad.T @ rows``.

    Args:
        grad: [T, N].
        rows: [T, K].

    Returns:
        [N, K].
    """
    return _PRODUCTS.multiply("weight_gradient", grad, rows)


@rows_gradient.register_fake
def _fake_rows_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(shape_of("rows_gradient", grad, weight))


@joint_rows_gradient.register_fake
def _fake_joint_rows_gradient(grad: Tensor, weights: list[Tensor]) -> Tensor:
    return grad.new_empty(grad.shape[0], weights[0].shape[1])


@weight_gradient.register_fake
def _fake_weight_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    return grad.new_empty(shape_of("weight_gradient", grad, rows))
