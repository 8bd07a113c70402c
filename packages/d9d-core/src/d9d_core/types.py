"""Types that cross the seams between components: named tensors, their specifications, and JSON state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Tensors of one microbatch by name.
Microbatch = Mapping[str, "Tensor"]
#: The microbatches of one optimizer step, for one data-parallel rank.
Pack = Sequence[Microbatch]
#: What JSON can hold; all state outside tensors.
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
State = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
