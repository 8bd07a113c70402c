"""Low-rank updates of linear layers, and base classes of all adapted modules.

Shapes: O features out, I features in, r rank, ``...`` any leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from d9d_core.kernel import OpSlot
from d9d_core.model import TermKind
from d9d_core.tensors import beside
from d9d_nn.linear import Linear, has_hooks
from d9d_nn.ops.deferred import as_autocast
from d9d_nn.ops.low_rank_linear import low_rank_linear
from torch import Tensor, nn

from d9d_peft.lora.dropout import dropped, layout_dependence

#: Names of the two child modules (factors) that LoRA adds to a layer, as in the ``peft`` library.
LORA_A, LORA_B = "lora_A", "lora_B"


class Down(Linear):
    """First factor, A, of a low-rank update: weight [r, I], initialised like ``torch.nn.Linear``."""

    def reset_parameters(self) -> None:
        """Draw the weight from U(-1/sqrt(I), 1/sqrt(I))."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))


class Up(Linear):
    """Second factor, B, of a low-rank update: weight [O, r], initially zeros so that the model is unchanged."""

    def reset_parameters(self) -> None:
        """Fill the weight with zeros."""
        nn.init.zeros_(self.weight)


class Adapted:
    """Base mixin of adapted modules of any type.

    All attributes that the mixin adds to a module are named ``lora_...``. Subclasses have ``lora_add(rank)``, which
    adds the factors on the weight's device and in its dtype, and ``lora_merged(weight)``, which returns the weight with
    the update added.

    Attributes:
        lora_files: for each added tensor, by its name within the module, its name in an adapter file and whether the
            tensor is transposed in the file.
    """

    lora_files: ClassVar[Mapping[str, tuple[str, bool]]]
    lora_dropout: float
    lora_scale: float
    lora_off: bool
    #: Class of the module without its update.
    lora_base: type

    def layout_dependence(self) -> Sequence[str]:
        """Describe how dropout, if there is any, depends on the division of the batch into microbatches."""
        return layout_dependence(self.lora_dropout)


class AdaptedLinear(Adapted):
    """Mixin that adds LoRA to a linear layer; calls the layer's original forward and adds the update.

    If a backend is bound to the op ``low_rank_linear``, it computes both, also for several layers on the same input
    (:func:`d9d_nn.linear.outputs_of`).
    """

    lora_files: ClassVar[Mapping[str, tuple[str, bool]]] = {
        f"{factor}.weight": (f"{factor}.weight", False) for factor in (LORA_A, LORA_B)
    }
    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    training: bool
    lora_A: Down  # noqa: N815 - name of the peft library
    lora_B: Up  # noqa: N815
    #: Index of this rank's part of the input features, and number of parts.
    lora_share: tuple[int, int]
    lora_linear: OpSlot

    def lora_add(self, rank: int) -> None:
        """Add the factors A and B to the layer."""
        with torch.device(self.weight.device):
            self.lora_A = Down(self.in_features, rank, std=0.0).to(self.weight.dtype)
            self.lora_B = Up(rank, self.out_features, std=0.0).to(self.weight.dtype)
        self.lora_share = (0, 1)
        self.lora_linear = OpSlot(
            "low_rank_linear", low_rank_linear, inputs=self.in_features, features=self.out_features, rank=rank
        )

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op ``low_rank_linear``, if the layer only multiplies and adds an update of two products."""
        plain = type(self).forward is AdaptedLinear.forward and type(self).lora_output is AdaptedLinear.lora_output
        base: Any = self.lora_base
        multiplies = base.forward in (nn.Linear.forward, Linear.forward)
        # A strategy such as fp8 may have replaced the product before or after the layer was adapted.
        multiplies &= getattr(type(self), "multiply", Linear.multiply) is Linear.multiply
        replaced = any("forward" in vars(part) for part in (self, self.lora_A, self.lora_B))
        return {"lora_linear": self.lora_linear} if plain and multiplies and not replaced else {}

    def tensor_parallel_terms(self) -> Mapping[str, TermKind]:
        """Names of the factors A and B, each with its role in the layer; see :class:`d9d_core.model.HasLinearTerms`."""
        return {LORA_A: "in", LORA_B: "out"}

    def share_inputs(self, part: int, parts: int) -> None:
        """Apply dropout only to this rank's part of the input features; see :class:`d9d_core.model.SharesInputs`."""
        self.lora_share = part, parts

    @property
    def joins(self) -> bool:
        """Whether a backend of the op computes layer and update in a call now; see :func:`d9d_nn.linear.outputs_of`."""
        if self.lora_linear.backend == "reference" or self.lora_off or (self.lora_dropout and self.training):
            return False
        parts: tuple[Any, ...] = self, self.lora_A, self.lora_B
        return not any(has_hooks(part) or _lends_or_defers(part) for part in parts)

    def together(self, rows: Tensor, layers: Sequence[Any]) -> Sequence[Tensor]:
        """Outputs [..., O] of layers that read the same rows [..., I], by the bound backend."""
        if any(layer.lora_linear.backend != self.lora_linear.backend for layer in layers):
            return [layer(rows) for layer in layers]
        outs: Sequence[Tensor] = self.lora_linear(
            as_autocast(rows),
            [as_autocast(layer.weight) for layer in layers],
            [None if layer.bias is None else as_autocast(layer.bias) for layer in layers],
            [as_autocast(layer.lora_A.weight) for layer in layers],
            [as_autocast(layer.lora_B.weight) for layer in layers],
            [layer.lora_scale for layer in layers],
        )
        return outs

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O]."""
        if self.joins:
            return self.together(x, [self])[0]
        own: Tensor = super().forward(x)  # type: ignore[misc]
        return own if self.lora_off else self.lora_output(own, x)

    def lora_term(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O]: ``scale * B A dropout(x)`` (section 4.1)."""
        term: Tensor = self.lora_B(self.lora_A(dropped(x, self.lora_dropout, self.training, self.lora_share)))
        return term * self.lora_scale

    def lora_output(self, own: Tensor, x: Tensor) -> Tensor:
        """Output [..., O] of the layer with its update.

        Args:
            own: output of the layer alone, [..., O].
            x: [..., I].
        """
        return own + self.lora_term(x)

    def lora_merged(self, weight: Tensor) -> Tensor:
        """Weight [O, I] with the update added, in the same dtype."""
        return merged_weight(weight, self.lora_A.weight, self.lora_B.weight, self.lora_scale)


def _lends_or_defers(layer: nn.Module) -> bool:
    """Whether another function computes the layer's product, or a deferral its weight gradient."""
    return isinstance(layer, Linear) and (layer.lends or layer.defers)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Weight ``W + scale * B A`` [O, I] in the dtype of W; computed in float32 or wider.

    Collective over the ranks that hold shards, if the weight is sharded.
    """
    a, b = beside(weight, a, b)
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module has a low-rank update."""
    return isinstance(module, Adapted)


def adapted_layers(stage: nn.Module) -> Iterator[tuple[str, Any]]:
    """Adapted modules of a stage, by name."""
    return ((name, module) for name, module in stage.named_modules() if is_adapted(module))


def adapt(layer: Any, kinds: dict[type, type], how: type[Adapted], *, rank: int, scale: float, dropout: float) -> None:
    """Adapt a module, in place: its own parameters keep their names, and its class becomes a subclass.

    Args:
        layer: module of a class that ``how`` supports.
        kinds: adapted classes made so far, by original class; layers that share a class can share compiled code.
        how: mixin that computes the output.
        rank: r.
        scale: factor of the update.
        dropout: fraction of the update's inputs that is dropped in training.
    """
    own = type(layer)
    if own not in kinds:
        kinds[own] = type(f"Lora{own.__name__}", (how, own), {"lora_base": own})
    layer.__class__ = kinds[own]
    layer.lora_scale, layer.lora_dropout, layer.lora_off = scale, dropout, False
    layer.lora_add(rank)
    layer.train(layer.training)


@torch.no_grad()
def merge(layer: Any) -> None:
    """Add the update to the module's weight, and restore the module's original class.

    Collective over the ranks that hold shards of the module.
    """
    layer.weight.copy_(layer.lora_merged(layer.weight))
    layer.__class__ = layer.lora_base
    for name in [name for name in (*vars(layer), *dict(layer.named_children())) if name.startswith("lora_")]:
        delattr(layer, name)
