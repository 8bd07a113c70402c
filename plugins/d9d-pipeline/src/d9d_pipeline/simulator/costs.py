"""Costs of actions: their times, and the activation memory of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from d9d_core.program.index import ProgramIndex
from d9d_core.schedule import Action, Backward, Forward, InputBackward, WeightBackward

#: One number for a whole rank, divided equally among its stages; or one number for each stage.
PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Costs of actions for the simulator: times, all in the same arbitrary unit.

    Attributes:
        forward: time of a forward of one microbatch.
        backward: time of a whole backward: both of its halves.
        weight: time of the weight gradients alone; input gradients take the rest of ``backward``.
        transfer: time to transfer one tensor from one rank to another, once both ranks are ready.
        overlap: hidden fraction of the shorter half of an overlapped pair: 0 runs the halves one after another, 1 at
            the same time.
        memory: size of one microbatch's activations, in any unit.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    weight: PerStage = 1.0
    transfer: float = 0.0
    overlap: float = 0.0
    memory: PerStage = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "transfer", "memory"):
            if not all(0 <= number < inf for number in _listed(getattr(self, name))):
                raise ValueError(f"costs: {name} is {getattr(self, name)}; it must be 0 or more, and finite")
        if not 0 <= self.overlap <= 1:
            raise ValueError(
                f"costs: overlap is {self.overlap}; use a number from 0 (hide nothing) to 1 (hide the shorter half)"
            )

    @classmethod
    def parse(cls, text: str) -> Costs:
        """Parse ``f=1,b=2,w=1,t=0.1,o=0.5``; missing costs have their default, and ``w`` is half of ``b``.

        Raises:
            ValueError: a letter is unknown, a value is not a number or out of range, or ``w`` is more than ``b``.
        """
        names = {"f": "forward", "b": "backward", "w": "weight", "t": "transfer", "o": "overlap"}
        values: dict[str, float] = {}
        for item in filter(None, text.split(",")):
            letter, _, number = item.partition("=")
            if letter.strip() not in names:
                known = ", ".join(f"{short} ({name})" for short, name in names.items())
                raise ValueError(f"costs: '{letter}' in '{text}' is unknown; use {known}, such as f=1,b=2,w=1,t=0.1")
            try:
                values[names[letter.strip()]] = float(number)
            except ValueError:
                raise ValueError(f"costs: '{item}' in '{text}' has no number; write {letter}=1.5") from None
        if "backward" in values:
            values.setdefault("weight", values["backward"] / 2)
        if (weight := values.get("weight", 1.0)) > (whole := values.get("backward", 2.0)):
            raise ValueError(
                f"costs: w={weight:g} in '{text}' is more than the whole backward, {whole:g}; use at most that"
            )
        return cls(**values)

    def durations(self, index: ProgramIndex) -> dict[type[Action], list[float]]:
        """Time of each type of computation on each stage.

        Raises:
            ValueError: costs are given for another number of stages, or weight gradients cost more than the backward.
        """
        backward, weight = of_stages(self.backward, index, "backward"), of_stages(self.weight, index, "weight")
        for stage, (whole, part) in enumerate(zip(backward, weight, strict=True)):
            if part > whole:
                text = f"costs: on stage {stage} weight is {part:g}, more than the whole backward, {whole:g}"
                raise ValueError(f"{text}; use at most that")
        return {
            Forward: of_stages(self.forward, index, "forward"),
            Backward: backward,
            WeightBackward: weight,
            InputBackward: [whole - part for whole, part in zip(backward, weight, strict=True)],
        }


def of_stages(value: PerStage, index: ProgramIndex, name: str) -> list[float]:
    """Cost of each stage, from one cost for all stages of a rank together or a list with one cost per stage.

    Raises:
        ValueError: the number of costs is not the number of stages.
    """
    if isinstance(value, Sequence):
        if len(value) != index.stages:
            raise ValueError(
                f"costs: {name} has {len(value)} numbers for {index.stages} stages; give one for each stage"
            )
        return [float(number) for number in value]
    return [value / index.hosts.count(host) for host in index.hosts]


def _listed(value: PerStage) -> Sequence[float]:
    return value if isinstance(value, Sequence) else (value,)
