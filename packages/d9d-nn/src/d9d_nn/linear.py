"""Linear layer with normal initial weights of a chosen standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from d9d_core.deferral import Deferral
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.ops.deferred import linear, may_defer


class Linear(nn.Linear):
    """Linear layer ``x @ weight.T + bias``; weight [out_features, in_features], bias [out_features] if there is one.

    Args:
        in_features: features of the input.
        out_features: features of the output.
        std: standard deviation of the initial weights.
        bias: whether there is a bias; it starts at zero.
    """

    #: Whether a call now may be computed together with calls of other layers on the same input, see :func:`outputs_of`.
    #: A subclass with a property that may be true overrides :meth:`together`.
    joins: bool = False

    def __init__(self, in_features: int, out_features: int, *, std: float, bias: bool = False) -> None:
        self.std = std  # before the base constructor, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)
        self._deferral: Deferral | None = None
        self._lent: Callable[[Tensor], Tensor | None] | None = None

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std); zero the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def defer_to(self, deferral: Deferral | None) -> Collection[str]:
        """Let ``deferral`` compute the weight gradient later; returns the names of the parameters concerned."""
        self._deferral = deferral
        return ("weight",)

    @property
    def defers(self) -> bool:
        """Whether a product computed now would defer its weight gradient."""
        return may_defer(self.weight, self._deferral)

    @property
    def lends(self) -> bool:
        """Whether :meth:`lend_product` set a function that is asked first for the product."""
        return self._lent is not None

    @property
    def deferral(self) -> Deferral | None:
        """Deferral of the weight gradient; ``None`` without one; see :class:`d9d_core.model.LendsProduct`."""
        return self._deferral

    def lend_product(self, compute: Callable[[Tensor], Tensor | None]) -> bool:
        """Ask ``compute`` for the product in each call, and multiply only if it returns ``None``.

        Returns:
            True; a subclass that multiplies in another precision returns ``False`` and ignores ``compute``.
        """
        self._lent = compute
        return True

    def together(self, rows: Tensor, layers: Sequence[Linear]) -> Sequence[Tensor]:
        """Outputs of layers that read the same input, each of which :attr:`joins`.

        Args:
            rows: [..., in_features].
            layers: layers with the same ``in_features``.

        Returns:
            [..., out_features] for each layer.
        """
        return [layer(rows) for layer in layers]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
        """Map [..., in_features] to [..., out_features]."""
        return self.multiply(input, self._deferral)

    def multiply(self, rows: Tensor, deferral: Deferral | None) -> Tensor:
        """Product of :meth:`forward`, separate so that a subclass can compute it in another precision.

        Updates that a fine-tuning method such as LoRA adds to the output are not computed here.

        Args:
            rows: [..., in_features].
            deferral: object that may compute the weight gradient later; ``None`` for an ordinary backward.

        Returns:
            [..., out_features].
        """
        out = None if self._lent is None else self._lent(rows)
        if out is not None:
            return out if self.bias is None else out + self.bias.to(out.dtype)
        if deferral is None:
            return functional.linear(rows, self.weight, self.bias)
        return linear(rows, self.weight, self.bias, deferral)


def outputs_of(rows: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Outputs of layers that read the same input.

    Layers that a fine-tuning method changed may be computed together (:attr:`Linear.joins`).

    Args:
        rows: [..., in_features].
        layers: linear layers with the same ``in_features``, of any class.

    Returns:
        [..., out_features] for each layer.
    """
    for layer in layers:
        if getattr(layer, "joins", False):  # layers of other libraries, which stand in for a projection, lack it
            return _joined_outputs(rows, layers)
    outputs = []
    for layer in layers:
        outputs.append(layer(rows))  # noqa: PERF401 - in Python 3.11 a comprehension is a call, and each block comes here
    return outputs


def _joined_outputs(rows: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Outputs of layers of which at least one joins."""
    joined: list[Any] = [layer for layer in layers if getattr(layer, "joins", False)]
    if len(joined) == 1:
        return [layer(rows) for layer in layers]
    together = iter(joined[0].together(rows, joined))
    return [next(together) if layer in joined else layer(rows) for layer in layers]


def is_plain(layer: Linear) -> bool:
    """Whether a layer is only a product with its weight, so that a kernel may read the weight instead of calling it.

    Such a layer has no bias, and no strategy or fine-tuning method has replaced the layer or its forward.
    """
    has_bias = layer.bias is not None
    return type(layer) is Linear and not has_bias and not layer.lends and "forward" not in vars(layer)


def has_hooks(layer: nn.Module) -> bool:
    """Whether hooks read or change the calls of a layer, which a kernel would bypass."""
    # torch has no public function that finds hooks, so private attributes are read; a test checks their names.
    return bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks  # noqa: SLF001
    )


def are_only_products(*layers: Linear) -> bool:
    """Whether calls of the layers compute only matrix products: no layer defers its weight gradient or has hooks."""
    return not any(layer.defers or has_hooks(layer) for layer in layers)
