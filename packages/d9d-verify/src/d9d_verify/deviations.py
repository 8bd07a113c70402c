"""Deviations between two measurements, and the limits within which they are rounding.

A sound run of the same job deviates too: microbatches add up in another order, kernels round at other places, and in a
narrow format that may send a token to another expert. So the limits come from such runs of the reference
(:class:`d9d_verify.measure.Jitter`): a deviation is allowed :data:`MARGIN` times what they show, and a least
deviation for each number format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from d9d_verify.measurement import Measurement
from d9d_verify.tolerances import compare_directions

Kind = Literal["loss", "grad_norm", "angle", "length", "lr", "update", "weight", "buffer", "state", "series"]

#: What is allowed, in multiples of the largest deviation of a sound run in any step.
MARGIN = 3.0

#: dtype -> the least that is allowed. In float32, sound runs deviate by 3e-7 at most, in bfloat16 by 5e-5 (loss), 6e-4
#: (norm), 5e-3 (length). Updates follow from equal gradients, so nothing but their own rounding is between them.
FLOORS: Mapping[torch.dtype, Mapping[Kind, float]] = MappingProxyType(
    {
        torch.float32: MappingProxyType(
            {
                "loss": 5e-6, "grad_norm": 1e-5, "angle": 1e-9, "length": 1e-5, "lr": 1e-12, "update": 2e-4,
                "weight": 1e-6, "buffer": 1e-5, "state": 1e-5, "series": 1e-4,
            }
        ),
        # Rounding may send a token to another expert, and so turn entries of a selection bias around.
        torch.bfloat16: MappingProxyType(
            {
                "loss": 1.5e-4, "grad_norm": 2e-3, "angle": 1e-4, "length": 1e-2, "lr": 1e-12, "update": 2e-3,
                "weight": 1e-5, "buffer": 1.5, "state": 1e-4, "series": 3e-3,
            }
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deviation:
    """Deviation of one thing in one step.

    Attributes:
        kind: which limit it is held against.
        name: of the parameter, buffer or series; empty for the loss and the like.
        step: 0-based; the number of steps for what is measured at the end.
        size: relative; infinite where one of two is not finite or there is nothing to compare with.
    """

    kind: Kind
    name: str
    step: int
    size: float


@dataclass(frozen=True)
class Limits:
    """Limits on the deviations of sound runs.

    Attributes:
        floors: the least that is allowed, by kind.
        seen: largest deviation of the reference's own sound runs, by kind and name.
    """

    floors: Mapping[Kind, float]
    seen: Mapping[tuple[Kind, str], float]

    @classmethod
    def of(cls, dtype: torch.dtype, reference: Measurement, sound: Sequence[Measurement] = ()) -> Limits:
        """Limits for a job.

        Args:
            dtype: the narrowest format that any of it computes in.
            reference: of the job.
            sound: further runs that are right, but round elsewhere.
        """
        seen: dict[tuple[Kind, str], float] = {}
        for run in sound:
            for found in deviations(run, reference):
                key = found.kind, found.name
                seen[key] = max(seen.get(key, 0.0), found.size if math.isfinite(found.size) else 0.0)
        return cls(FLOORS[dtype], seen)

    def allowed(self, deviation: Deviation) -> float:
        """Largest size that still counts as rounding."""
        own = MARGIN * self.seen.get((deviation.kind, deviation.name), 0.0)
        # A token that goes to another expert shows in some parameters here and in others there.
        anywhere = max((size for (kind, _), size in self.seen.items() if kind == deviation.kind), default=0.0)
        return max(self.floors[deviation.kind], own, anywhere)


def deviations(measured: Measurement, reference: Measurement) -> Iterator[Deviation]:
    """Deviations between two measurements, in the order in which a run computes; names and shapes have to be equal."""
    parameters = {name for step in range(reference.steps) for name in reference.under(f"{step}/gradients")}
    for step in range(reference.steps):
        yield Deviation("loss", "", step, _of_number(f"{step}/loss", measured, reference))
        yield Deviation("grad_norm", "", step, _of_number(f"{step}/grad_norm", measured, reference))
        found = measured.under(f"{step}/gradients")
        here, there = (_before_clipping(of, step) for of in (measured, reference))
        for name, expected in reference.under(f"{step}/gradients").items():
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
                stuck = torch.equal(was[name], now[name])  # what never moves is wrong however far it should have
                yield Deviation("buffer", name, step, math.inf if stuck else _distance(now[name], then[name]))
        state = measured.under(f"{step}/optimizer")
        for name, expected in reference.under(f"{step}/optimizer").items():
            yield Deviation("state", name, step, _distance(state[name], expected, _rounding(expected)))
    yield from _of_series(measured, reference)


def _of_series(measured: Measurement, reference: Measurement) -> Iterator[Deviation]:
    """Deviations of metrics and evaluation; the cells of a table are judged together, as a vector."""
    cells: dict[str, list[tuple[float, float]]] = {}
    for name, value in reference.numbers.items():
        if name.startswith("end/"):
            cells.setdefault(name.removeprefix("end/").partition("[")[0], []).append((measured.numbers[name], value))
    for series, pairs in cells.items():
        # A cell without a value is NaN, in both.
        filled = [pair for pair in pairs if not (math.isnan(pair[0]) and math.isnan(pair[1]))]
        found, expected = torch.tensor(filled, dtype=torch.float64).reshape(-1, 2).unbind(1)
        kind: Kind = "loss" if series.startswith("eval/") else "series"
        yield Deviation(kind, series, reference.steps, _distance(found, expected))


def _of_number(name: str, measured: Measurement, reference: Measurement) -> float:
    """Relative deviation of a number; infinite if only one is finite."""
    a, b = measured.numbers[name], reference.numbers[name]
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) and math.isfinite(b) else math.inf


def _before_clipping(measured: Measurement, step: int) -> float:
    """Factor from the gradients that the optimizer gets to those before clipping, by which a wrong length shows."""
    max_norm = measured.numbers.get("start/max_norm", math.inf)
    return max(1.0, (measured.numbers[f"{step}/grad_norm"] + 1e-6) / max_norm)


def _update(name: str, step: int, was: Tensor, now: Tensor, were: Tensor, then: Tensor) -> Iterator[Deviation]:
    """Deviations of an update and of the weights' length, which shows a missing decay."""
    update, expected = now.double() - was.double(), then.double() - were.double()
    yield Deviation("update", name, step, _distance(update, expected, _rounding(then)))
    length = (now.double().norm() - then.double().norm()).abs().item() / max(then.double().norm().item(), 1e-30)
    # One element more or less that is rounded up.
    spare = 2 * torch.finfo(then.dtype).eps / max(then.numel(), 1)
    yield Deviation("weight", name, step, _net(length, spare))


def _rounding(tensor: Tensor) -> float:
    """Length of the error if one of a thousand elements, and one more, is rounded to the other side."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    largest = tensor.abs().max().item()
    return torch.finfo(tensor.dtype).eps * largest * math.sqrt(1 + tensor.numel() / 1000)


def _distance(actual: Tensor, expected: Tensor, spare: float = 0.0) -> float:
    """Length of the difference beyond ``spare``, relative to the expected length."""
    length = expected.double().norm().item()
    distance = _net(_difference(actual, expected).norm().item(), spare)
    if distance == 0:
        return 0.0
    return distance / length if length and math.isfinite(distance) and math.isfinite(length) else math.inf


def _difference(actual: Tensor, expected: Tensor) -> Tensor:
    if actual.dtype == expected.dtype == torch.int16:
        # Lower bits of a number, as of master weights, go around where the upper ones change.
        return (actual - expected).double()
    return actual.double() - expected.double()


def _net(value: float, spare: float) -> float:
    return value if not math.isfinite(value) else max(0.0, value - spare)
