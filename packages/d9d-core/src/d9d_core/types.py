"""Types shared by all components: named tensors, their specifications, and JSON state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Json", "Microbatch", "Pack", "State", "TensorSpec"]

#: Name -> tensor, of one microbatch.
Microbatch = Mapping[str, "Tensor"]
#: Microbatches of one optimizer step, for one data-parallel rank.
Pack = Sequence[Microbatch]
#: Value that JSON can hold.
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
#: JSON state by name, without tensors.
State = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
