"""Tolerances of comparisons between two computations of the same result, per dtype.

Values are compared element by element. Gradients are compared by angle and norm, per tensor or per row, because single
elements that nearly cancel are unreliable, while a wrong direction indicates an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from d9d_verify.tolerances import TOLERANCES, Tolerance, compare_directions
from torch import Tensor

__all__ = [
    "TOLERANCES", "Tolerance", "assert_close_gradients", "assert_close_values", "compare_directions", "tolerance",
]  # fmt: skip


def tolerance(*tensors: Tensor) -> Tolerance:
    """Widest tolerance of the tensors' dtypes.

    Raises:
        KeyError: the table has no entry for a dtype.
    """
    return max((TOLERANCES[tensor.dtype] for tensor in tensors), key=lambda entry: entry.rtol)


def assert_close_values(
    actual: Tensor, expected: Tensor, within: Tolerance | None = None, what: str = "values"
) -> None:
    """Assert that values are close element by element, with equal shapes; NaN equals nothing.

    Args:
        actual: computed values, any shape.
        expected: expected values.
        within: tolerance; by default according to the dtypes.
        what: name of the tensors in the message.

    Raises:
        AssertionError: shapes differ, or values differ by more than the tolerance; the message shows the largest
            difference.
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
    """Assert that gradients are close in angle and norm. A gradient that should be zero must be zero.

    Args:
        actual: parameter name -> gradient.
        expected: gradients with the same names and shapes.
        within: tolerance; by default according to the dtypes.
        by: compare each tensor, or each row (last dimension), as one vector.

    Raises:
        AssertionError: names or shapes differ, or gradients are not close; the message lists the ten worst.
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
