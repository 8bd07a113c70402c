"""Fine-tuning method ``dora``: low-rank terms for the direction of each row of a weight, and its trained magnitude.

Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation". Shapes: O features out, I features in, r rank,
``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from d9d_weights import Mapper
from torch import Tensor, nn

from d9d_peft.lora import files
from d9d_peft.lora.linear import Adapted, AdaptedLinear, adapted_layers, merged_weight
from d9d_peft.lora.merging import Term, fold
from d9d_peft.lora.method import Lora

#: Child that holds a layer's magnitudes; the name is that of the ``peft`` library.
MAGNITUDE = "lora_magnitude_vector"


class Magnitude(nn.Module):
    """Magnitudes of the rows of a weight, [O], on the device of that weight.

    Args:
        weight: [O, I].
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.new_empty(weight.shape[0]))

    def reset_parameters(self) -> None:
        """Fill with ones; :meth:`Dora.start` puts the norms in their place once the weights are there."""
        nn.init.ones_(self.weight)


class Decomposed(AdaptedLinear):
    """Part of the class of a layer with magnitudes: ``m / |W + s B A| * (W x + s B A dropout(x)) + bias``.

    Norms are those of rows.
    """

    lora_files: ClassVar[Mapping[str, tuple[str, bool]]] = {
        **AdaptedLinear.lora_files,
        f"{MAGNITUDE}.weight": (MAGNITUDE, False),
    }
    bias: nn.Parameter | None
    lora_magnitude_vector: Magnitude

    def lora_add(self, rank: int) -> None:
        """Add both factors and the magnitudes."""
        super().lora_add(rank)
        self.lora_magnitude_vector = Magnitude(self.weight)

    def tensor_parallel_terms(self) -> Mapping[str, Literal["in", "out"]]:
        """None that could be split: the norms of rows need whole rows."""
        return {}

    def lora_output(self, own: Tensor, x: Tensor) -> Tensor:
        """Output [..., O] of the layer with term and magnitudes."""
        # Section 4.3: the norm is a constant in the backward.
        norm = row_norms(self.weight, self.lora_A.weight, self.lora_B.weight, self.lora_scale)
        factor = (self.lora_magnitude_vector.weight / norm).to(own.dtype)
        out = (own + self.lora_term(x)) * factor
        return out if self.bias is None else out + (1 - factor) * self.bias.to(own.dtype)

    def lora_merged(self, weight: Tensor) -> Tensor:
        """Weight [O, I] with term and magnitudes in it, of the same dtype."""
        factors = self.lora_A.weight, self.lora_B.weight, self.lora_magnitude_vector.weight
        return _merged(weight, *factors, self.lora_scale)


class Dora(Lora):
    """Method that adds low-rank terms and magnitudes to linear layers, and trains nothing else."""

    how: ClassVar[type[Adapted]] = Decomposed

    @torch.no_grad()
    def start(self, stage: nn.Module) -> None:
        """Fill the magnitudes with the norms of the weights' rows; see :class:`d9d_core.extend.StartsFromWeights`."""
        for _, layer in adapted_layers(stage):
            if isinstance(layer, Decomposed):
                wide = torch.promote_types(layer.weight.dtype, torch.float32)
                norm = torch.linalg.vector_norm(layer.weight, dim=1, dtype=wide)
                layer.lora_magnitude_vector.weight.copy_(norm)

    def adapter_config(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, Any]:
        """Contents of ``adapter_config.json``; see :class:`d9d_weights.AdapterFormat`."""
        return {**super().adapter_config(stage, published), "use_dora": True}

    def check_adapter(self, config_json: Mapping[str, Any]) -> None:
        """Compare the config with that of an adapter to start from.

        Raises:
            CheckpointError: it is of another kind, rank or scale.
        """
        files.check_config(self._config, config_json, use_dora=True)

    def _fold(self, term: Term) -> Mapper:
        scale = self._config.scale

        def merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor) -> Tensor:
            return _merged(weight, a, b, magnitude, scale)

        return fold(term.weight, (*term.factors, f"{term.owner}.{MAGNITUDE}.weight"), merged)


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Norms of the rows of ``W + scale * B A``, [O], in float32 or wider.

    Expanded, so that no matrix of the weight's size is made: ``|w|^2 + 2 s (W A^T) b + s^2 b (A A^T) b`` for each row.

    Args:
        weight: W, [O, I].
        a: A, [r, I].
        b: B, [O, r].
        scale: s.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = a.to(weight.dtype), b.to(wide)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    crossed = ((weight @ a.T).to(wide) * b).sum(1)
    of_term = ((b @ (a.to(wide) @ a.to(wide).T)) * b).sum(1)
    norm: Tensor = (squares + 2 * scale * crossed + scale**2 * of_term).clamp(min=torch.finfo(wide).tiny).sqrt()
    return norm


def _merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    turned = merged_weight(weight.to(wide), a, b, scale)
    factor: Tensor = magnitude.to(wide) / torch.linalg.vector_norm(turned, dim=1)
    return (turned * factor.unsqueeze(1)).to(weight.dtype)
