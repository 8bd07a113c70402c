"""Placements of parameters: which of a rank's parameters are whole, and over which mesh dimensions others are cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from d9d_core.tensors import is_dtensor
from torch import Tensor, nn

#: A number in a qualified name, such as that of a layer.
_NUMBER = re.compile(r"(?<=\.)\d+\b")


@dataclass(frozen=True)
class Placed:
    """Parameters of one placement whose names differ in numbers only.

    Attributes:
        pattern: their name, with ``*`` for numbers that differ.
        count: how many they are.
        shape: whole shape of each; the first one's where they differ.
        placement: the placement in words.
        trained: whether they train.
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
    """Text in which the numbers in qualified names, such as those of layers, are ``*``."""
    return _NUMBER.sub("*", text)


def placement_of(parameter: Tensor) -> str:
    """Placement of a parameter in words: what each mesh dimension of more than one rank does to it."""
    if not is_dtensor(parameter):
        return "whole"
    mesh, parts = parameter.device_mesh, []
    for dim, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)):
        if (ranks := mesh.size(dim)) > 1:
            cut = getattr(placement, "dim", None)
            how = "replicated over" if cut is None else f"dim {cut} sharded over"
            parts.append(f"{how} {name}={ranks}")
    return ", ".join(parts) or "whole"
