"""Low-rank term beside a linear layer. Shapes: O features out, I features in, r rank, ``...`` any leading dims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from d9d_nn.linear import Linear
from torch import Tensor, nn

from d9d_peft.lora.dropout import dropped, layout_dependence

#: Children that a term adds to a layer; the names are those of the ``peft`` library.
LORA_A, LORA_B = "lora_A", "lora_B"


class Down(Linear):
    """First factor of a term, weight [r, I]; starts as ``torch.nn.Linear`` does, as in the paper's own code."""

    def reset_parameters(self) -> None:
        """Draw the weight from U(-1/sqrt(I), 1/sqrt(I))."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))


class Up(Linear):
    """Second factor of a term, weight [O, r]; starts at zero, so that the model starts as it was."""

    def reset_parameters(self) -> None:
        """Zero the weight."""
        nn.init.zeros_(self.weight)


class Adapted:
    """Part of the class of an adapted layer that does not depend on what the layer is.

    Attributes:
        lora_children: children that a term adds.
    """

    lora_children: ClassVar[tuple[str, ...]] = (LORA_A, LORA_B)
    lora_A: Down  # noqa: N815 - as the peft library calls it
    lora_B: Up  # noqa: N815
    lora_dropout: float
    lora_scale: float
    lora_off: bool
    #: Class of the layer without its term.
    lora_base: type

    def layout_dependence(self) -> Sequence[str]:
        """Dropout, if there is any."""
        return layout_dependence(self.lora_dropout)

    def lora_added(self) -> None:
        """Add what a subclass has besides the factors."""

    def lora_term(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O]: ``scale * B A dropout(x)`` (section 4.1)."""
        training = self.training  # type: ignore[attr-defined]
        term: Tensor = self.lora_B(self.lora_A(dropped(x, self.lora_dropout, training)))
        return term * self.lora_scale

    def lora_output(self, own: Tensor, x: Tensor) -> Tensor:
        """Output [..., O] of the layer with its term.

        Args:
            own: [..., O], that of the layer alone.
            x: [..., I].
        """
        return own + self.lora_term(x)

    def lora_merged(self, weight: Tensor) -> Tensor:
        """Weight [O, I] with the term in it, of the same dtype."""
        return merged_weight(weight, self.lora_A.weight, self.lora_B.weight, self.lora_scale)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Weight ``W + scale * B A`` [O, I] in the dtype of W; computed in float32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module has a low-rank term."""
    return isinstance(module, Adapted)


def adapted_layers(stage: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers of a stage that have a term, by name."""
    return ((name, module) for name, module in stage.named_modules() if is_adapted(module))


def adapt(
    layer: nn.Linear,
    kinds: dict[type, type],
    rank: int,
    scale: float,
    dropout: float,
    how: type[Adapted] = Adapted,
) -> None:
    """Add a term to a layer, in place: its own parameters keep their names, and its class becomes a subclass.

    Args:
        layer: any kind of linear layer; its own forward is called as it is.
        kinds: classes made so far, by the class of the layer; equal layers must be of one class for ``compile``.
        rank: r.
        scale: factor of the term.
        dropout: fraction of the term's inputs that is dropped while training.
        how: how the layer and the term make the output.
    """
    with torch.device(layer.weight.device):
        down = Down(layer.in_features, rank, std=0.0).to(layer.weight.dtype)
        up = Up(rank, layer.out_features, std=0.0).to(layer.weight.dtype)
    own = type(layer)
    if own not in kinds:
        kinds[own] = _adapted_class(own, how)
    layer.__class__ = kinds[own]
    layer.add_module(LORA_A, down)
    layer.add_module(LORA_B, up)
    layer.lora_scale, layer.lora_dropout, layer.lora_off = scale, dropout, False  # type: ignore[assignment]
    layer.lora_added()  # type: ignore[operator]
    layer.train(layer.training)


@torch.no_grad()
def merge(layer: Any) -> None:
    """Fold the term into the layer's weight, and make it a layer of its own class again.

    Collective over the ranks that share the layer.
    """
    layer.weight.copy_(layer.lora_merged(layer.weight))
    for child in layer.lora_children:
        delattr(layer, child)
    del layer.lora_scale, layer.lora_dropout, layer.lora_off
    layer.__class__ = layer.lora_base


def _adapted_class(base: type, how: type[Adapted]) -> type:
    class AdaptedLayer(how, base):  # type: ignore[misc, valid-type]
        lora_base = base

        def forward(self, x: Tensor) -> Tensor:
            own: Tensor = super().forward(x)
            return own if self.lora_off else self.lora_output(own, x)

    AdaptedLayer.__name__ = AdaptedLayer.__qualname__ = f"Lora{base.__name__}"
    return AdaptedLayer
