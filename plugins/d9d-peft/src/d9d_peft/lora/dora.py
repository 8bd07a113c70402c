"""Fine-tuning method ``dora``: low-rank updates for the direction of each row of a weight, and trained magnitudes.

Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation". Shapes: O features out, I features in, r rank,
``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from d9d_core.model import TermKind
from d9d_core.strategy import Kind, StepShape
from d9d_core.tensors import beside, full, local
from d9d_weights.graph.base import Mapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_peft.lora import files
from d9d_peft.lora.linear import Adapted, AdaptedLinear, adapted_layers, merged_weight
from d9d_peft.lora.merging import Term, fold
from d9d_peft.lora.method import Lora

#: Name of the child module with a layer's magnitudes, as in the ``peft`` library.
MAGNITUDE = "lora_magnitude_vector"


class Magnitude(nn.Module):
    """DoRA magnitudes of the rows of a weight, a parameter [O] on the device of the weight.

    Args:
        weight: [O, I].
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.new_empty(weight.shape[0]))

    def reset_parameters(self) -> None:
        """Fill the magnitudes with ones; :meth:`Dora.start` sets them to the norms once the weights are loaded."""
        nn.init.ones_(self.weight)


def whole(weight: Tensor) -> Tensor:
    """Return a weight unchanged: the default of ``lora_own``, for weights that are whole on this rank."""
    return weight


class Decomposed(AdaptedLinear):
    """Mixin that adds DoRA to a linear layer: ``m / |W + s B A| * (W x + s B A dropout(x)) + bias``.

    ``m`` [O] are the trained magnitudes, ``|W + s B A|`` [O] the norms of the rows.
    """

    lora_files: ClassVar[Mapping[str, tuple[str, bool]]] = {
        **AdaptedLinear.lora_files,
        f"{MAGNITUDE}.weight": (MAGNITUDE, False),
    }
    bias: nn.Parameter | None
    lora_magnitude_vector: Magnitude
    #: Function that returns this rank's part of a weight.
    lora_own: Callable[[Tensor], Tensor]
    #: Function that sums squares of parts of rows over ranks; ``None`` if rows are whole.
    lora_add_up: Callable[[Tensor], Tensor] | None

    def lora_add(self, rank: int) -> None:
        """Add the factors A and B and the magnitudes to the layer."""
        super().lora_add(rank)
        self.lora_magnitude_vector = Magnitude(self.weight)
        self.lora_own, self.lora_add_up = whole, None

    def tensor_parallel_terms(self) -> Mapping[str, TermKind]:
        """Factors and magnitudes; see :class:`d9d_core.model.HasLinearTerms`."""
        return {**super().tensor_parallel_terms(), MAGNITUDE: "out_scale"}

    def split_features(self, own: Callable[[Tensor], Tensor], add_up: Callable[[Tensor], Tensor] | None = None) -> None:
        """Compute only this rank's part of the features from now on; see :class:`d9d_core.model.SplitsFeatures`."""
        self.lora_own, self.lora_add_up = own, add_up

    def forward_collectives(self, step: StepShape) -> Sequence[tuple[Kind, int | None]]:  # noqa: ARG002 - any batch
        """Collective of a layer whose rows are split over ranks: the all-reduce of the rows' sums of squares, [O]."""
        return [("all_reduce", self.out_features * max(self.weight.dtype.itemsize, 4))]

    def lora_output(self, own: Tensor, x: Tensor) -> Tensor:
        """Output [..., O] of the layer with update and magnitudes."""
        # Section 4.3 of the paper: the backward treats the norm as a constant.
        a, b = local(self.lora_A.weight), self.lora_own(self.lora_B.weight)
        norm = row_norms(self.weight, a, b, self.lora_scale, self.lora_add_up)
        factor = (self.lora_own(self.lora_magnitude_vector.weight) / norm).to(own.dtype)
        out = (own + self.lora_term(x)) * factor
        return out if self.bias is None else out + (1 - factor) * self.bias.to(own.dtype)

    def lora_merged(self, weight: Tensor) -> Tensor:
        """Weight [O, I] with update and magnitudes merged in, in the same dtype."""
        factors = self.lora_A.weight, self.lora_B.weight, self.lora_magnitude_vector.weight
        return _merged(weight, *factors, self.lora_scale)


class Dora(Lora):
    """DoRA: adds low-rank updates and magnitudes to linear layers, and trains only these."""

    how: ClassVar[type[Adapted]] = Decomposed

    @torch.no_grad()
    def start(self, stage: nn.Module) -> None:
        """Fill the magnitudes with the norms of the weights' rows; see :class:`d9d_core.peft.StartsFromWeights`.

        Collective over the ranks that hold parts of rows: a weight whose rows are split is gathered, so that norms are
        bit-identical for every sharding.
        """
        for _, layer in adapted_layers(stage):
            if isinstance(layer, Decomposed):
                wide = torch.promote_types(layer.weight.dtype, torch.float32)
                weight = full(layer.weight) if _splits_rows(layer.weight) else layer.weight
                magnitude = layer.lora_magnitude_vector.weight
                (norm,) = beside(magnitude, torch.linalg.vector_norm(weight, dim=1, dtype=wide))
                magnitude.copy_(norm)

    def adapter_config(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, Any]:
        """Contents of ``adapter_config.json``; see :class:`d9d_weights.hugging_face.adapter.AdapterFormat`."""
        return {**super().adapter_config(stage, published), "use_dora": True}

    def check_adapter(
        self, stage: nn.Module, published: Mapping[str, str], config_json: Mapping[str, Any], names: Collection[str]
    ) -> None:
        """Check the config of an adapter to start from.

        Raises:
            CheckpointError: the adapter is of another method, lacks magnitudes, has another rank or scale, or has
                features that this method does not support.
        """
        files.check_config(self._config, config_json, names, use_dora=True)
        files.check_patterns(self._config, config_json, self._files_of(stage, published))

    def _fold(self, term: Term) -> Mapper:
        scale = self._config.scale_of(term.owner)

        def merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor) -> Tensor:
            return _merged(weight, a, b, magnitude, scale)

        return fold(term.weight, (*term.factors, f"{term.owner}.{MAGNITUDE}.weight"), merged)


def _splits_rows(weight: Tensor) -> bool:
    """Whether ranks hold parts of the rows of a weight [O, I]."""
    return isinstance(weight, DTensor) and any(placement.is_shard(1) for placement in weight.placements)


@torch.no_grad()
def row_norms(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, add_up: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """DoRA norms of the rows of ``W + scale * B A``, [O], in float32 or wider.

    The square of the norm is expanded, so that no matrix of the weight's size is allocated:
    ``|w|^2 + 2 s (W A^T) b + s^2 b (A A^T) b`` for each row.

    Args:
        weight: W, [O, I].
        a: A, [r, I].
        b: B, [O, r].
        scale: s.
        add_up: function that sums squares [O] over ranks, if each rank has a part of I.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = a.to(weight.dtype), b.to(wide)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    crossed = ((weight @ a.T).to(wide) * b).sum(1)
    of_term = ((b @ (a.to(wide) @ a.to(wide).T)) * b).sum(1)
    total: Tensor = squares + 2 * scale * crossed + scale**2 * of_term
    return (total if add_up is None else add_up(total)).clamp(min=torch.finfo(wide).tiny).sqrt()


def _merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    turned = merged_weight(weight.to(wide), a, b, scale)
    (magnitude,) = beside(turned, magnitude)
    factor: Tensor = magnitude.to(wide) / torch.linalg.vector_norm(turned, dim=1)
    return (turned * factor.unsqueeze(1)).to(weight.dtype)
