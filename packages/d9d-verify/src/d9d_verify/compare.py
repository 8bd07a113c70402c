"""Comparison of a layout's measurement with the reference, which is a measurement of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from d9d_verify.deviations import Deviation, Kind, Limits, deviations
from d9d_verify.measurement import Measurement, when


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of a layout with the reference.

    Attributes:
        layout: name of the layout.
        loss: largest relative deviation of the loss in any step.
        grad_norm: largest relative deviation of the gradient norm in any step.
        angle: largest ``1 - cos`` between a gradient and the reference's in any step, and the parameter's name.
        norm: largest relative deviation of a gradient's norm in any step, and the parameter's name.
        update: largest relative deviation of an update in any step, beyond its rounding, and the parameter's name.
        diverged: first step (0-based) with a deviation above its limit, and a text about it; ``None`` if there is none.
    """

    layout: str
    loss: float
    grad_norm: float
    angle: tuple[float, str]
    norm: tuple[float, str]
    update: tuple[float, str]
    diverged: tuple[int, str] | None

    @property
    def passed(self) -> bool:
        """Whether all deviations are within their limits."""
        return self.diverged is None

    @classmethod
    def failure(cls, layout: str, why: str) -> Verdict:
        """Make the verdict for a layout that could not be measured, or whose measurement cannot be compared."""
        nothing = (math.nan, "nothing")
        return cls(layout, math.nan, math.nan, nothing, nothing, nothing, (0, why))

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values; non-finite numbers become texts."""
        values = asdict(self) | {"passed": self.passed}
        return {key: _json_value(value) for key, value in values.items()}


def compare(layout: str, measured: Measurement, reference: Measurement, limits: Limits) -> Verdict:
    """Compare a layout's measurement with the reference (one process), step by step.

    Initial weights, and values that several ranks have, must be bitwise equal; other values must be within limits.

    Args:
        layout: name of the layout in messages.
        measured: measurement of the layout.
        reference: measurement of one process.
        limits: limits of the deviations.
    """
    if problem := _other_names(measured, reference):
        return Verdict.failure(layout, problem)
    found = list(deviations(measured, reference, limits.noise))
    return Verdict(
        layout=layout,
        loss=_largest(found, "loss")[0],
        grad_norm=_largest(found, "grad_norm")[0],
        angle=_largest(found, "angle"),
        norm=_largest(found, "length"),
        update=_largest(found, "update"),
        diverged=_first_divergence(measured, reference, found, limits),
    )


def compared(reference: Measurement) -> str:
    """Text that lists the compared values of a measurement."""
    steps = range(reference.steps)
    tensors = {kind: set().union(*(reference.under(f"{s}/{kind}") for s in steps)) for kind in ("gradients", "model")}
    state = set().union(*(reference.under(f"{s}/optimizer") for s in steps))
    buffers = tensors["model"] - tensors["gradients"]
    series = sorted(name.removeprefix("end/") for name in reference.numbers if name.startswith("end/"))
    named = sorted({name.partition("[")[0] for name in series})
    parts = [
        f"{reference.steps} steps: loss and its terms, number of tokens, gradient norm, learning rate, "
        f"{len(tensors['gradients'])} gradients before the optimizer's step, and its updates from equal gradients",
        f"{len(state)} tensors of the optimizer's state" if state else "no optimizer state",
        f"{len(buffers)} buffers and frozen parameters" if buffers else "",
        f"the series {', '.join(named)}" if named else "no metrics, no evaluation",
        "and bitwise equality of values that several ranks have",
    ]
    return ", ".join(filter(None, parts))


def _first_divergence(
    measured: Measurement, reference: Measurement, found: Iterable[Deviation], limits: Limits
) -> tuple[int, str] | None:
    for name, tensor in reference.under("start/model").items():
        if not torch.equal(measured.tensors[f"start/model/{name}"], tensor):
            return 0, f"the initial values of {name} differ"
    beyond = [deviation for deviation in found if not deviation.size <= limits.allowed(deviation)]
    problems = [(when(_path(deviation)), _described(deviation, limits, beyond)) for deviation in beyond[:1]]
    problems += [
        (when(name), f"ranks that should have equal values have different values of {_value_name(name)}")
        for name in measured.disagreements[:1]
    ]
    if not problems:
        return None
    (step, _), text = min(problems)
    return int(min(max(step, 0), reference.steps - 1)), text  # the step of a value at the end is the number of steps


def _path(deviation: Deviation) -> str:
    kinds: dict[Kind, str] = dict.fromkeys(("angle", "length", "noise"), "gradients")
    kinds |= {"update": "model", "weight": "model", "buffer": "model", "state": "optimizer"}
    return f"{deviation.step}/{kinds.get(deviation.kind, deviation.kind)}/{deviation.name}"


def _described(deviation: Deviation, limits: Limits, beyond: Sequence[Deviation]) -> str:
    name, size, allowed = deviation.name, f"{deviation.size:.1e}", f"{limits.allowed(deviation):.0e}"
    texts: dict[Kind, str] = {
        "loss": f"{name or 'the loss'} is off by {size} (allowed {allowed})",
        "tokens": f"the number of tokens is off by {size}",
        "grad_norm": f"the gradient norm is off by {size} (allowed {allowed})",
        "angle": f"the gradient of {name}: 1-cos {size} (allowed {allowed})",
        "length": f"the gradient of {name}: length off by {size} (allowed {allowed})",
        "noise": f"the gradient of {name}, only rounding in correct runs, is {size} times longer (allowed {allowed})",
        "lr": f"the learning rate is off by {size}",
        "update": f"the update of {name} from equal gradients is off by {size} (allowed {allowed})",
        "weight": f"the length of {name} after an update from equal gradients is off by {size} (allowed {allowed})",
        "buffer": f"the buffer {name} is off by {size} (allowed {allowed})",
        "state": f"the optimizer's {name} after a step with equal gradients is off by {size} (allowed {allowed})",
        "series": f"the series {name} is off by {size} (allowed {allowed})",
    }
    text = texts[deviation.kind]
    if deviation.kind in ("loss", "grad_norm"):
        gradients = [d for d in beyond if d.step == deviation.step and d.kind == "length"]
        if gradients:
            worst, of = _largest(gradients, "length")
            text += f"; the gradient of {of} most, by {worst:.1e}"
    return text


def _value_name(name: str) -> str:
    step, _, rest = name.partition("/")
    kind, _, what = rest.partition("/")
    texts = {"model": what, "gradients": f"the gradient of {what}", "optimizer": f"the optimizer's {what}"}
    return texts.get(kind, rest) if step != "end" else f"the series {rest}"


def _other_names(measured: Measurement, reference: Measurement) -> str | None:
    for here, there in ((measured.tensors, reference.tensors), (measured.numbers, reference.numbers)):
        if here.keys() != there.keys():
            missing, extra = sorted(there.keys() - here.keys()), sorted(here.keys() - there.keys())
            return f"different parameters, states or series: missing {missing[:3]}, extra {extra[:3]}"
    shapes = [name for name, tensor in reference.tensors.items() if measured.tensors[name].shape != tensor.shape]
    return f"the shape of {_value_name(shapes[0])} differs" if shapes else None


def _largest(found: Iterable[Deviation], kind: Kind) -> tuple[float, str]:
    """Largest deviation of a kind, with its name; NaN counts as the largest."""
    of_kind = [deviation for deviation in found if deviation.kind == kind]
    if not of_kind:
        return math.nan, "no parameter"
    worst = max(of_kind, key=lambda deviation: math.inf if math.isnan(deviation.size) else deviation.size)
    return worst.size, worst.name


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_json_value(item) for item in value] if isinstance(value, tuple) else value
