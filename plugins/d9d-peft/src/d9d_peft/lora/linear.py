"""Low-rank term beside a linear layer. Shapes: O features out, I features in, r rank, ``...`` any leading dims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

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


class _Adapted:
    """Part of the class of an adapted layer that does not depend on what the layer is."""

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

    def lora_term(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O]: ``scale * B A dropout(x)`` (section 4.1)."""
        training = self.training  # type: ignore[attr-defined]
        term: Tensor = self.lora_B(self.lora_A(dropped(x, self.lora_dropout, training)))
        return term * self.lora_scale


def is_adapted(module: nn.Module) -> bool:
    """Whether a module has a low-rank term."""
    return isinstance(module, _Adapted)


def adapted_layers(stage: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers of a stage that have a term, by name."""
    return ((name, module) for name, module in stage.named_modules() if is_adapted(module))


def adapt(layer: nn.Linear, kinds: dict[type, type], *, rank: int, scale: float, dropout: float) -> None:
    """Add a term to a layer, in place: its own parameters keep their names, and its class becomes a subclass.

    Args:
        layer: any kind of linear layer; its own forward is called as it is.
        kinds: classes made so far, by the class of the layer; equal layers must be of one class for ``compile``.
        rank: r.
        scale: factor of the term.
        dropout: fraction of the term's inputs that is dropped while training.
    """
    with torch.device(layer.weight.device):
        down = Down(layer.in_features, rank, std=0.0).to(layer.weight.dtype)
        up = Up(rank, layer.out_features, std=0.0).to(layer.weight.dtype)
    own = type(layer)
    if own not in kinds:
        kinds[own] = _adapted_class(own)
    layer.__class__ = kinds[own]
    layer.add_module(LORA_A, down)
    layer.add_module(LORA_B, up)
    layer.lora_scale, layer.lora_dropout, layer.lora_off = scale, dropout, False  # type: ignore[assignment]
    layer.train(layer.training)


@torch.no_grad()
def merge(layer: Any) -> None:
    """Fold the term into the layer's weight, and make it a layer of its own class again.

    The product is computed in float32 or wider. Collective over the ranks that share the layer.
    """
    weight = layer.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    term = layer.lora_B.weight.to(wide) @ layer.lora_A.weight.to(wide)
    weight.copy_((weight.to(wide) + layer.lora_scale * term).to(weight.dtype))
    for child in (LORA_A, LORA_B):
        delattr(layer, child)
    del layer.lora_scale, layer.lora_dropout, layer.lora_off
    layer.__class__ = layer.lora_base


def _adapted_class(base: type) -> type:
    class Adapted(_Adapted, base):  # type: ignore[misc]
        lora_base = base

        def forward(self, x: Tensor) -> Tensor:
            own: Tensor = super().forward(x)
            return own if self.lora_off else own + self.lora_term(x)

    Adapted.__name__ = Adapted.__qualname__ = f"Lora{base.__name__}"
    return Adapted
