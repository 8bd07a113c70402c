"""Results of an evaluation, and of the comparison of two models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from d9d_inference.evaluation.paired import Difference


@dataclass(frozen=True)
class Evaluated:
    """Losses and metrics of one evaluated model, for each evaluation set.

    Attributes:
        name: name of the model, as given by the user.
        step: step of the checkpoint with the weights; ``None`` for pretrained weights.
        sets: name of a set -> name of a series, such as ``loss`` -> value.
        tables: name of a set -> name of a series -> table of a metric, as a list of rows.
        samples: name of a set -> number of counted samples.
    """

    name: str
    step: int | None
    sets: Mapping[str, Mapping[str, float]]
    samples: Mapping[str, int]
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        sets = {name: {"samples": self.samples[name], **values} for name, values in self.sets.items()}
        for name, tables in self.tables.items():
            sets[name] = {**sets[name], **tables}
        return {"model": self.name, "step": self.step, "sets": sets}


@dataclass(frozen=True)
class Report:
    """Result of ``d9d evaluate`` for one model, or for two compared models.

    Attributes:
        first: results of the model.
        other: results of the model to compare with; ``None`` without a comparison.
        differences: name of a set -> mean loss of the first model minus mean loss of the other, with its interval.
    """

    first: Evaluated
    other: Evaluated | None = None
    differences: Mapping[str, Difference] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        values = self.first.to_json()
        if self.other is not None:
            compared = {name: self._verdict(name) for name in self.differences}
            values["compare"] = {"other": self.other.to_json(), "differences": compared}
        return values

    def verdict(self, name: str) -> str:
        """Phrase for the table: the better model on a set, or that no difference was found."""
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
