"""Results of an evaluation, and of the comparison of two models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from d9d_inference.evaluation.paired import Difference


@dataclass(frozen=True)
class Evaluated:
    """Result of the evaluation of one model: its values.

    Attributes:
        name: of the model, as the user gave it.
        step: of the checkpoint its weights are from; ``None`` if they are published ones.
        sets: values by set and series.
        tables: tables of metrics by set and series, as lists of rows.
        samples: numbers of samples that count, by set.
    """

    name: str
    step: int | None
    sets: Mapping[str, Mapping[str, float]]
    samples: Mapping[str, int]
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        sets = {name: {"samples": self.samples[name], **values} for name, values in self.sets.items()}
        for name, tables in self.tables.items():
            sets[name] = {**sets[name], **tables}
        return {"model": self.name, "step": self.step, "sets": sets}


@dataclass(frozen=True)
class Report:
    """Result of ``d9d evaluate``: the report on one model, or on two that are compared.

    Attributes:
        first: the model.
        other: the model that it is compared with, if there is one.
        differences: of the mean losses, the first model's less the other's, by set.
    """

    first: Evaluated
    other: Evaluated | None = None
    differences: Mapping[str, Difference] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        values = self.first.to_json()
        if self.other is not None:
            compared = {name: self._verdict(name) for name in self.differences}
            values["compare"] = {"other": self.other.to_json(), "differences": compared}
        return values

    def verdict(self, name: str) -> str:
        """Sentence about the difference on a set."""
        assert self.other is not None
        found = self.differences[name]
        if found.is_none:
            return "no difference found"
        better = self.first.name if found.mean < 0 else self.other.name
        return f"{better} is better"

    def _verdict(self, name: str) -> dict[str, Any]:
        found = self.differences[name]
        better = None if found.is_none else "first" if found.mean < 0 else "other"
        return {
            "loss_difference": found.mean,
            "standard_error": found.standard_error,
            "confidence_interval": [found.low, found.high],
            "confidence": found.confidence,
            "samples": found.samples,
            "better": better,
        }
