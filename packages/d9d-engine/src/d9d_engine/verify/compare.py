"""Comparison of what a layout computes with the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from d9d_engine.verify.measure import Measurement
from d9d_engine.verify.tolerances import TOLERANCES, Tolerance, compare_directions

#: Rounding errors of one step are in the weights of the next: what later steps may deviate more, per step.
GROWTH = 8.0


@dataclass(frozen=True)
class Verdict:
    """Verdict of comparing a layout with the reference: how far it is.

    Attributes:
        layout: how the layout is called.
        loss: largest relative deviation of the loss in any step.
        grad_norm: largest relative deviation of the gradient norm in any step.
        angle: largest ``1 - cos`` between gradients of the first step, and of which parameter.
        norm: largest relative deviation of a gradient's length in the first step, and of which parameter.
        diverged: the first step (0-based) and what exceeded its tolerance there; ``None`` if nothing did.
    """

    layout: str
    loss: float
    grad_norm: float
    angle: tuple[float, str]
    norm: tuple[float, str]
    diverged: tuple[int, str] | None

    @property
    def passed(self) -> bool:
        """Whether all deviations are within tolerance."""
        return self.diverged is None

    def to_json(self) -> dict[str, Any]:
        """Verdict as a JSON object; what is not finite becomes text."""
        values = asdict(self) | {"passed": self.passed}
        return {key: _speakable(value) for key, value in values.items()}


def compare(layout: str, measured: Measurement, reference: Measurement, dtype: torch.dtype) -> Verdict:
    """Compare initial weights exactly, then loss, gradient norm and every parameter's gradient, step by step.

    Last come the weights after the last step, if both have them.

    Args:
        layout: how messages call what was measured.
        measured: what it computed.
        reference: what one process computed.
        dtype: the narrowest format either computed in.
    """
    first = reference.gradients[0]
    directions = {
        name: compare_directions(measured.gradients[0][name], first[name]) for name in _shared(measured, first)
    }
    return Verdict(
        layout=layout,
        loss=max(map(_relative, measured.losses, reference.losses)),
        grad_norm=max(map(_relative, measured.grad_norms, reference.grad_norms)),
        angle=_worst({name: angle for name, (angle, _) in directions.items()}),
        norm=_worst({name: length for name, (_, length) in directions.items()}),
        diverged=_divergence(measured, reference, TOLERANCES[dtype]),
    )


def _divergence(measured: Measurement, reference: Measurement, base: Tolerance) -> tuple[int, str] | None:
    if problem := _other_names(measured.weights, reference.weights, "parameters"):
        return 0, problem
    for name, weight in reference.weights.items():
        if not torch.equal(measured.weights[name], weight):
            return 0, f"the initial weights of {name} differ"
    for step, expected in enumerate(reference.gradients):
        factor = GROWTH**step
        if problem := _other_names(measured.gradients[step], expected, "gradients"):
            return step, problem
        for what, limit, a, b in (
            ("the loss", base.rtol, measured.losses[step], reference.losses[step]),
            ("the gradient norm", base.norm, measured.grad_norms[step], reference.grad_norms[step]),
        ):
            if not (deviation := _relative(a, b)) <= limit * factor:
                culprit = _culprit(measured.gradients[step], expected)
                return step, f"{what} is off by {deviation:.1e} (allowed {limit * factor:.0e}){culprit}"
        # Squared, because 1 - cos grows with the square of a deviation.
        for name, gradient in expected.items():
            angle, length = compare_directions(measured.gradients[step][name], gradient)
            if not (angle <= base.angle * factor**2 and length <= base.norm * factor):
                return step, f"the gradient of {name}: 1-cos {angle:.1e}, length off by {length:.1e}"
    factor = GROWTH ** len(reference.gradients)
    for name, weight in reference.trained.items() if measured.trained else ():
        angle, length = compare_directions(measured.trained[name], weight)
        if not (angle <= base.angle * factor**2 and length <= base.norm * factor):
            text = f"the weights of {name} after the last step: 1-cos {angle:.1e}, length off by {length:.1e}"
            return len(reference.gradients) - 1, text
    return None


def _culprit(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    off = {name: compare_directions(measured[name], gradient)[1] for name, gradient in expected.items()}
    worst, name = _worst(off)
    return f"; the gradient of {name} most, by {worst:.1e}"


def _other_names(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> str | None:
    if measured.keys() == expected.keys():
        shapes = [name for name in expected if measured[name].shape != expected[name].shape]
        return f"the shape of {shapes[0]} is another" if shapes else None
    missing, extra = sorted(expected.keys() - measured.keys()), sorted(measured.keys() - expected.keys())
    return f"other {what}: missing {missing[:3]}, extra {extra[:3]}"


def _shared(measured: Measurement, expected: Mapping[str, Tensor]) -> list[str]:
    found = measured.gradients[0]
    return [name for name in expected if name in found and found[name].shape == expected[name].shape]


def _worst(values: Mapping[str, float]) -> tuple[float, str]:
    """Largest value and its name; NaN is the largest of all."""
    if not values:
        return math.nan, "no parameter"
    name = max(values, key=lambda key: math.inf if math.isnan(values[key]) else values[key])
    return values[name], name


def _relative(a: float, b: float) -> float:
    if a == b:
        return 0.0
    return abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) and math.isfinite(b) else math.inf


def _speakable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_speakable(item) for item in value] if isinstance(value, tuple) else value
