"""Placements of parameters: the mesh dimensions over which they are replicated or sharded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from d9d_core.tensors import is_dtensor
from torch import Tensor, nn

#: Number in a qualified name, such as a layer index.
_NUMBER = re.compile(r"(?<=\.)\d+\b")


@dataclass(frozen=True)
class Placed:
    """Parameters with equal placement and shape whose names differ only in numbers.

    Attributes:
        pattern: name; of several parameters, with ``*`` for the numbers.
        count: number of parameters.
        shape: full shape.
        placement: text about the placement.
        trained: whether the parameters are trained.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    placement: str
    trained: bool


def placed_parameters(model: nn.Module) -> Sequence[Placed]:
    """Group the parameters of a rank by placement, shape and pattern of names, in the order of registration."""
    groups: dict[tuple[str, str, tuple[int, ...], bool], list[str]] = {}
    for name, parameter in model.named_parameters():
        pattern = without_numbers(name)
        key = (pattern, placement_of(parameter), tuple(parameter.shape), parameter.requires_grad)
        groups.setdefault(key, []).append(name)
    return [
        Placed(pattern if len(names) > 1 else names[0], len(names), shape, placement, trained)
        for (pattern, placement, shape, trained), names in groups.items()
    ]


def without_numbers(text: str) -> str:
    """Replace the numbers in qualified names, such as layer indices, by ``*``."""
    return _NUMBER.sub("*", text)


def placement_of(parameter: Tensor) -> str:
    """Text about the placement of a parameter: replicated or sharded over each mesh dimension of several ranks."""
    if not is_dtensor(parameter):
        return "whole"
    mesh, parts = parameter.device_mesh, []
    for dim, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)):
        if (ranks := mesh.size(dim)) > 1:
            cut = getattr(placement, "dim", None)
            how = "replicated over" if cut is None else f"dim {cut} sharded over"
            parts.append(f"{how} {name}={ranks}")
    return ", ".join(parts) or "whole"
