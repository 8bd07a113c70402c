"""Deviations between two measurements, and limits that allow for rounding.

Correct runs of the same job also deviate: microbatches are summed in another order, kernels round differently, and in a
narrow dtype rounding may send a token to another expert. So limits come from varied runs of the reference
(:class:`d9d_verify.measure.Jitter`): :data:`MARGIN` times their deviations are allowed, and at least a minimum for
each dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from d9d_verify.measurement import Measurement
from d9d_verify.tolerances import compare_directions

Kind = Literal[
    "loss", "tokens", "grad_norm", "angle", "length", "noise", "lr", "update", "weight", "buffer", "state", "series",
]  # fmt: skip

#: Allowed deviation, in multiples of the largest deviation of a correct run in any step.
MARGIN = 3.0

#: A gradient whose mean ``1 - cos`` between correct runs is above this is only rounding; random directions have 1.
NOISY = 0.3
#: Allowed length of a gradient that is only rounding, in multiples of its largest length in correct runs.
LOUDEST = 10.0

#: dtype -> smallest limit of each kind of deviation. In float32, correct runs deviate by at most 3e-7; in bfloat16, by
#: 5e-5 (loss), 6e-4 (gradient norm) and 5e-3 (length of a gradient). Updates start from equal gradients in all runs, so
#: they differ by their own rounding only.
FLOORS: Mapping[torch.dtype, Mapping[Kind, float]] = MappingProxyType(
    {
        torch.float32: MappingProxyType(
            {
                "loss": 5e-6, "tokens": 0.0, "grad_norm": 1e-5, "angle": 1e-9, "length": 1e-5, "lr": 1e-12,
                "update": 2e-4, "weight": 1e-6, "buffer": 1e-5, "state": 1e-5, "series": 1e-4,
            }
        ),
        # Rounding may send a token to another expert, which can flip the sign of a selection bias's update.
        torch.bfloat16: MappingProxyType(
            {
                "loss": 1.5e-4, "tokens": 0.0, "grad_norm": 2e-3, "angle": 1e-4, "length": 1e-2, "lr": 1e-12,
                "update": 2e-3, "weight": 1e-5, "buffer": 1.5, "state": 1e-4, "series": 3e-3,
            }
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deviation:
    """Deviation of one value in one step.

    Attributes:
        kind: kind of the value, which selects the limit.
        name: name of the parameter, buffer, optimizer state or series; ``the loss term X`` for a loss term; empty for
            the total training loss, the number of tokens, the gradient norm and the learning rate.
        step: 0-based step; the number of steps for values at the end.
        size: relative deviation; for ``angle``, 1 - cos. Infinite if only one value is finite, if an update, buffer,
            state or series differs from a reference of length zero, or if only the reference changed a buffer. For
            ``noise``: the length of a gradient, relative to its length in correct runs.
    """

    kind: Kind
    name: str
    step: int
    size: float


@dataclass(frozen=True)
class Limits:
    """Limits of the deviations.

    Attributes:
        floors: kind -> smallest limit.
        seen: (kind, name) -> largest deviation between correct runs of the reference.
        noise: name of each gradient that is only rounding -> its largest length in correct runs.
    """

    floors: Mapping[Kind, float]
    seen: Mapping[tuple[Kind, str], float]
    noise: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, dtype: torch.dtype, reference: Measurement, sound: Sequence[Measurement] = ()) -> Limits:
        """Compute the limits for a job.

        Args:
            dtype: narrowest dtype of the computation.
            reference: measurement of the reference.
            sound: measurements of further correct runs with other rounding.
        """
        seen: dict[tuple[Kind, str], float] = {}
        noise = _noise(reference, sound)
        for run in sound:
            for found in deviations(run, reference, noise):
                key = found.kind, found.name
                seen[key] = max(seen.get(key, 0.0), found.size if math.isfinite(found.size) else 0.0)
        return cls(FLOORS[dtype], seen, noise)

    def allowed(self, deviation: Deviation) -> float:
        """Largest size of a deviation of this kind and name that counts as rounding."""
        if deviation.kind == "noise":
            return LOUDEST
        own = MARGIN * self.seen.get((deviation.kind, deviation.name), 0.0)
        # A token that goes to another expert affects different parameters in different runs, so use the largest of the
        # kind.
        anywhere = max((size for (kind, _), size in self.seen.items() if kind == deviation.kind), default=0.0)
        return max(self.floors[deviation.kind], own, anywhere)


def _noise(reference: Measurement, sound: Sequence[Measurement]) -> dict[str, float]:
    """Gradients that consist of rounding errors only, because their true value is zero: name -> largest length.

    Examples are gradients of key biases, on which attention weights do not depend, and of queries that see one key
    only. Their directions differ freely between correct runs, so they must not widen the limits of other gradients.
    """
    angles: dict[str, list[float]] = {}
    lengths: dict[str, float] = {}
    for run in sound:
        for step in range(reference.steps):
            found = run.under(f"{step}/gradients")
            here, there = (_before_clipping(of, step) for of in (run, reference))
            for name, expected in reference.under(f"{step}/gradients").items():
                angles.setdefault(name, []).append(compare_directions(found[name], expected)[0])
                longest = max(_length(found[name]) * here, _length(expected) * there)
                lengths[name] = max(lengths.get(name, 0.0), longest)
    return {name: lengths[name] for name, each in angles.items() if sum(each) / len(each) > NOISY}


def deviations(
    measured: Measurement, reference: Measurement, noise: Mapping[str, float] = MappingProxyType({})
) -> Iterator[Deviation]:
    """Deviations of two measurements with equal names and shapes, in the order of computation.

    Args:
        measured: measurement to compare.
        reference: measurement of one process.
        noise: :attr:`Limits.noise`; these gradients are compared by their length only.
    """
    parameters = {name for step in range(reference.steps) for name in reference.under(f"{step}/gradients")}
    for step in range(reference.steps):
        yield Deviation("loss", "", step, _of_number(f"{step}/loss", measured, reference))
        for name in reference.numbers:
            if name.startswith(f"{step}/loss/"):
                term = name.removeprefix(f"{step}/loss/")
                yield Deviation("loss", f"the loss term {term}", step, _of_number(name, measured, reference))
        yield Deviation("tokens", "", step, _of_number(f"{step}/tokens", measured, reference))
        yield Deviation("grad_norm", "", step, _of_number(f"{step}/grad_norm", measured, reference))
        found = measured.under(f"{step}/gradients")
        here, there = (_before_clipping(of, step) for of in (measured, reference))
        # Shorter gradients are zeros that a kernel rounds, such as queries that see one key only.
        shortest = torch.finfo(torch.float32).eps * reference.numbers[f"{step}/grad_norm"]
        for name, expected in reference.under(f"{step}/gradients").items():
            if max(_length(found[name]) * here, _length(expected) * there) <= shortest:
                continue
            if name in noise:
                yield Deviation("noise", name, step, _length(found[name]) * here / noise[name])
                continue
            angle, length = compare_directions(found[name] * here, expected * there)
            yield Deviation("angle", name, step, angle)
            yield Deviation("length", name, step, length)
        yield Deviation("lr", "", step, _of_number(f"{step}/lr", measured, reference))
        before = f"{step - 1}/model" if step else "start/model"
        was, were, now, then = (m.under(at) for at in (before, f"{step}/model") for m in (measured, reference))
        for name in then:
            if name in parameters:
                yield from _update(name, step, was[name], now[name], were[name], then[name])
            elif not torch.equal(now[name], then[name]):
                stuck = torch.equal(
                    was[name], now[name]
                )  # an unchanged buffer is wrong, no matter how small the expected change
                yield Deviation("buffer", name, step, math.inf if stuck else distance(now[name], then[name]))
        state = measured.under(f"{step}/optimizer")
        for name, expected in reference.under(f"{step}/optimizer").items():
            yield Deviation("state", name, step, distance(state[name], expected, _rounding(expected)))
    yield from _of_series(measured, reference)


def _of_series(measured: Measurement, reference: Measurement) -> Iterator[Deviation]:
    """Deviations of metrics and evaluation; the cells of a table are compared together, as a vector."""
    cells: dict[str, list[tuple[float, float]]] = {}
    for name, value in reference.numbers.items():
        if name.startswith("end/"):
            cells.setdefault(name.removeprefix("end/").partition("[")[0], []).append((measured.numbers[name], value))
    for series, pairs in cells.items():
        # A cell without a value is NaN in both measurements.
        filled = [pair for pair in pairs if not (math.isnan(pair[0]) and math.isnan(pair[1]))]
        found, expected = torch.tensor(filled, dtype=torch.float64).reshape(-1, 2).unbind(1)
        kind: Kind = "loss" if series.startswith("eval/") else "series"
        yield Deviation(kind, series, reference.steps, distance(found, expected))


def _of_number(name: str, measured: Measurement, reference: Measurement) -> float:
    """Relative deviation of a number; infinite if only one of the two measurements is finite."""
    a, b = measured.numbers[name], reference.numbers[name]
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) and math.isfinite(b) else math.inf


def _before_clipping(measured: Measurement, step: int) -> float:
    """Factor that undoes clipping of recorded gradients, so that deviations of their length are visible."""
    max_norm = measured.numbers.get("start/max_norm", math.inf)
    return max(1.0, (measured.numbers[f"{step}/grad_norm"] + 1e-6) / max_norm)


def _update(name: str, step: int, was: Tensor, now: Tensor, were: Tensor, then: Tensor) -> Iterator[Deviation]:
    """Deviations of a parameter's update, and of the norm of its weights, which reveals missing weight decay."""
    update, expected = now.double() - was.double(), then.double() - were.double()
    yield Deviation("update", name, step, distance(update, expected, _rounding(then)))
    length = (now.double().norm() - then.double().norm()).abs().item() / max(then.double().norm().item(), 1e-30)
    # Allow one element to be rounded the other way.
    spare = 2 * torch.finfo(then.dtype).eps / max(then.numel(), 1)
    yield Deviation("weight", name, step, _net(length, spare))


def _rounding(tensor: Tensor) -> float:
    """Norm of the error if 0.1 % of a tensor's elements, at least one, are rounded in the other direction."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    largest = tensor.abs().max().item()
    return torch.finfo(tensor.dtype).eps * largest * math.sqrt(1 + tensor.numel() / 1000)


def distance(actual: Tensor, expected: Tensor, spare: float = 0.0) -> float:
    """Relative distance: length of the difference beyond ``spare``, relative to the expected length."""
    length = expected.double().norm().item()
    distance = _net(_difference(actual, expected).norm().item(), spare)
    if distance == 0:
        return 0.0
    # If the expected length is not finite, the distance is not finite either.
    return distance / length if length and math.isfinite(distance) else math.inf


def _difference(actual: Tensor, expected: Tensor) -> Tensor:
    if actual.dtype == expected.dtype == torch.int16:
        # int16 holds the lower bits of master weights, whose differences wrap around when the upper bits change.
        return (actual - expected).double()
    return actual.double() - expected.double()


def _length(tensor: Tensor) -> float:
    return float(tensor.double().norm().item())


def _net(value: float, spare: float) -> float:
    return value if not math.isfinite(value) else max(0.0, value - spare)
