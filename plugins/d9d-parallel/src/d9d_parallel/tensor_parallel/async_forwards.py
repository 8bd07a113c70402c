"""Forwards of split modules that overlap matrix products with the all-gather or reduce-scatter of positions.

Shapes: B samples, S positions, R ranks, H features of hidden states, O features of a layer on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from d9d_parallel.tensor_parallel.async_products import AsyncProducts
from d9d_parallel.tensor_parallel.forwards import first_argument, local_of


class HandedProduct:
    """Product that the module around a linear layer computes for the layer, before the layer is called.

    A layer with the trait :class:`~d9d_core.model.LendsProduct` calls this object instead of multiplying.
    """

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._out: Tensor | None = None

    def hand(self, rows: Tensor | None, out: Tensor | None) -> None:
        """Store ``rows`` [B, S, H] and their product ``out`` [B, S, O]; remove both if the arguments are ``None``."""
        self._rows, self._out = rows, out

    def __call__(self, rows: Tensor) -> Tensor | None:
        """Return the product once, if it was computed from these rows; otherwise ``None``."""
        if rows is not self._rows:
            return None
        out = self._out
        self.hand(None, None)
        return out


class Column(NamedTuple):
    """Column-wise layer whose matrix product the module around it computes.

    Attributes:
        layer: a :class:`~d9d_core.model.LendsProduct`.
        own: function that returns this rank's part of the layer's weight.
        handed: object that hands the product to the layer.
    """

    layer: Any
    own: Callable[[Tensor], Tensor]
    handed: HandedProduct


class AsyncColumns:
    """Asynchronous forward of a module with column-wise layers; gathers all positions of the first argument.

    Other modules that read the argument, such as the layers' LoRA matrices, get the gathered rows too.

    Args:
        module: module that takes hidden states [B, S, H], and may take shards of other modules' parameters.
        columns: layers of the module that lend their products.
        products: object that gathers positions from the other ranks and multiplies at the same time.
    """

    def __init__(self, module: nn.Module, columns: Sequence[Column], products: AsyncProducts) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.first = first_argument(module)
        self.columns, self.products = columns, products

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather and multiply at the same time, then call the forward."""
        hidden, *others = args or (kwargs.pop(self.first),)
        others = [local_of(value) for value in others]
        kwargs = {name: local_of(value) for name, value in kwargs.items()}
        whole, outs = self.products.columns(
            hidden,
            [column.own(column.layer.weight) for column in self.columns],
            [column.layer.deferral for column in self.columns],
        )
        for column, out in zip(self.columns, outs, strict=True):
            column.handed.hand(whole, out)
        del outs  # each layer's forward frees its product
        try:
            return self.forward(whole, *others, **kwargs)
        finally:
            for column in self.columns:
                column.handed.hand(None, None)


class RowProduct:
    """Product of a row-wise layer with the reduce-scatter of its output; the layer calls it instead of multiplying.

    Args:
        layer: the layer, with the trait :class:`~d9d_core.model.LendsProduct`.
        products: object that multiplies and sums over the other ranks at the same time.
    """

    def __init__(self, layer: Any, products: AsyncProducts) -> None:
        self.layer, self.products = layer, products

    def __call__(self, rows: Tensor) -> Tensor:
        """Map [B, S, features of this rank] to this rank's positions [B, S / R, H]. Collective over the ranks."""
        return self.products.row(rows, local_of(self.layer.weight), self.layer.deferral)
