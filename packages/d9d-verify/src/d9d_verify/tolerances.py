"""Tolerances per dtype between two computations of the same values.

Gradients are compared as directions, by angle and norm, per tensor or per row, because single elements that nearly
cancel are mostly rounding error, while a wrong direction is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest deviations that count as equal.

    Attributes:
        rtol, atol: for values: ``|a - b| <= atol + rtol * |b|``.
        angle: for gradients: largest ``1 - cos`` of the angle between them.
        norm: for gradients: largest relative difference of their norms.
    """

    rtol: float
    atol: float
    angle: float
    norm: float


#: dtype of the computation -> tolerance. Values may differ by some tens of rounding errors, gradients by more, because
#: errors add up over a chain of operations.
TOLERANCES: Mapping[torch.dtype, Tolerance] = MappingProxyType(
    {
        torch.float64: Tolerance(rtol=1e-9, atol=1e-11, angle=1e-12, norm=1e-9),
        torch.float32: Tolerance(rtol=1e-5, atol=1e-6, angle=1e-8, norm=1e-5),
        torch.float16: Tolerance(rtol=5e-3, atol=1e-3, angle=1e-4, norm=5e-3),
        torch.bfloat16: Tolerance(rtol=3e-2, atol=1e-2, angle=2e-3, norm=2e-2),
    }
)


def compare_directions(
    actual: Tensor, expected: Tensor, by: Literal["tensor", "row"] = "tensor"
) -> tuple[float, float]:
    """Largest ``1 - cos`` and largest relative difference of norms between two tensors, or between their rows.

    For two zero vectors, both results are 0; for a zero and a non-zero vector, both are 1.
    """
    shape = (1, -1) if by == "tensor" or actual.dim() == 0 else (-1, actual.shape[-1])
    first, second = actual.detach().double().reshape(shape), expected.detach().double().reshape(shape)
    first_norm, second_norm = first.norm(dim=1), second.norm(dim=1)
    both_zero = (first_norm == 0) & (second_norm == 0)
    product = first_norm * second_norm
    cosine = torch.where(product == 0, 0.0, (first * second).sum(1) / product)
    # 1 - cos is inaccurate near zero; half the squared distance of unit vectors is not.
    unit_distance = (first / first_norm.unsqueeze(1) - second / second_norm.unsqueeze(1)).square().sum(1) / 2
    angle = torch.where(cosine > 0.5, unit_distance, 1 - cosine)
    length = (first_norm - second_norm).abs() / torch.maximum(first_norm, second_norm)
    zero = torch.zeros_like(angle)
    return torch.where(both_zero, zero, angle).max().item(), torch.where(both_zero, zero, length).max().item()
