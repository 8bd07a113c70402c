"""How near two computations of the same thing must be, per dtype.

Values are compared element by element. Gradients are compared as directions: by angle and by norm, per tensor or per
row, because single elements that cancel to almost nothing say little, and a wrong direction says everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What still counts as equal.

    Attributes:
        rtol, atol: values: ``|a - b| <= atol + rtol * |b|``.
        angle: gradients: largest ``1 - cos`` of the angle between them.
        norm: gradients: largest relative difference of their lengths.
    """

    rtol: float
    atol: float
    angle: float
    norm: float


#: dtype of the computation -> tolerance. Values allow some tens of roundings, gradients a chain of them.
TOLERANCES: Mapping[torch.dtype, Tolerance] = MappingProxyType(
    {
        torch.float64: Tolerance(rtol=1e-9, atol=1e-11, angle=1e-12, norm=1e-9),
        torch.float32: Tolerance(rtol=1e-5, atol=1e-6, angle=1e-8, norm=1e-5),
        torch.float16: Tolerance(rtol=5e-3, atol=1e-3, angle=1e-4, norm=5e-3),
        torch.bfloat16: Tolerance(rtol=3e-2, atol=1e-2, angle=2e-3, norm=2e-2),
    }
)


def tolerance(*tensors: Tensor) -> Tolerance:
    """The widest tolerance of the tensors' dtypes.

    Raises:
        KeyError: one of them is no floating-point dtype of the table.
    """
    return max((TOLERANCES[tensor.dtype] for tensor in tensors), key=lambda entry: entry.rtol)


def assert_close_values(
    actual: Tensor, expected: Tensor, within: Tolerance | None = None, what: str = "values"
) -> None:
    """Compare element by element, shapes included; NaN is equal to nothing.

    Args:
        actual: what was computed, any shape.
        expected: what it should be.
        within: how near; by default what the dtypes allow.
        what: the name of the tensors in the message.

    Raises:
        AssertionError: they differ by more; the message says where most.
    """
    limit = within or tolerance(actual, expected)
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=limit.rtol, atol=limit.atol, msg=lambda text: f"{what}: {text}"
    )


def assert_close_gradients(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    within: Tolerance | None = None,
    by: Literal["tensor", "row"] = "tensor",
) -> None:
    """Compare gradients by angle and norm. A gradient that should be zero must be zero.

    Args:
        actual: parameter name -> gradient.
        expected: the same names and shapes.
        within: how near; by default what the dtypes allow.
        by: compare each tensor as one vector, or each row (last dim) as one.

    Raises:
        AssertionError: names or shapes differ, or some gradients do; the message lists the worst ten.
    """
    missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
    assert not missing, f"no gradient for {sorted(missing)}"
    assert not extra, f"unexpected gradients for {sorted(extra)}"
    problems: list[tuple[float, str]] = []
    for name, reference in expected.items():
        found = actual[name]
        assert found.shape == reference.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(reference.shape)}"
        limit = within or tolerance(found, reference)
        angle, length = compare_directions(found, reference, by)
        # 'not <=' so that NaN counts as a difference.
        if not (angle <= limit.angle and length <= limit.norm):
            excess = max(angle / limit.angle, length / limit.norm) if math.isfinite(angle) else math.inf
            text = f"{name}: 1-cos {angle:.2e} (allowed {limit.angle:.0e}), norm off by {length:.2e} ({limit.norm:.0e})"
            problems.append((excess, text))
    if problems:
        worst = [text for _, text in sorted(problems, key=lambda problem: problem[0], reverse=True)[:10]]
        text = f"{len(problems)} of {len(expected)} gradients differ, worst first:"
        raise AssertionError("\n  ".join((text, *worst)))


def compare_directions(
    actual: Tensor, expected: Tensor, by: Literal["tensor", "row"] = "tensor"
) -> tuple[float, float]:
    """The worst ``1 - cos`` and the worst relative difference of norms, over the tensor or its rows.

    Two zero vectors agree in both; a zero and a non-zero vector differ by 1 in both.
    """
    shape = (1, -1) if by == "tensor" or actual.dim() == 0 else (-1, actual.shape[-1])
    first, second = actual.detach().double().reshape(shape), expected.detach().double().reshape(shape)
    first_norm, second_norm = first.norm(dim=1), second.norm(dim=1)
    both_zero = (first_norm == 0) & (second_norm == 0)
    product = first_norm * second_norm
    cosine = torch.where(product == 0, 0.0, (first * second).sum(1) / product)
    # 1 - cos loses its digits near zero, half the squared distance of unit vectors keeps them.
    unit_distance = (first / first_norm.unsqueeze(1) - second / second_norm.unsqueeze(1)).square().sum(1) / 2
    angle = torch.where(cosine > 0.5, unit_distance, 1 - cosine)
    length = (first_norm - second_norm).abs() / torch.maximum(first_norm, second_norm)
    zero = torch.zeros_like(angle)
    return torch.where(both_zero, zero, angle).max().item(), torch.where(both_zero, zero, length).max().item()
