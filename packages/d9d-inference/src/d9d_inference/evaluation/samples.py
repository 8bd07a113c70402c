"""Losses of single samples, for the comparison of two models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from d9d_core.errors import DataError
from d9d_core.types import Microbatch
from d9d_engine.run.real_samples import ROWS, only
from d9d_engine.step.checked_task import CheckedTask
from d9d_weights.sharding.collectives import all_gather_objects
from torch import Tensor
from torch import distributed as dist

from d9d_inference.evaluation.paired import Difference, compare

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SampleLosses:
    """Losses of single samples in an evaluation set.

    Attributes:
        rows: int64 [n], index of each sample's first row in the data, ascending.
        sums: [n, T], sum of each of the T loss terms over a sample.
        weights: [n, T], weight of each term in a sample, such as its number of predicted tokens.
        coefficients: loss term -> coefficient in the loss, in the order of the T terms.
    """

    rows: npt.NDArray[np.int64]
    sums: Values
    weights: Values
    coefficients: Mapping[str, float]

    def difference(self, other: SampleLosses, where: str, confidence: float = 0.95) -> Difference:
        """Compute the mean loss of this model minus the mean loss of another model, with a confidence interval.

        Args:
            other: losses of another model on the same data.
            where: name of the set, for messages.
            confidence: confidence level of the interval.

        Raises:
            DataError: the samples or their weights differ, there are too few samples, or a loss is not finite.
        """
        alike = self.rows.shape == other.rows.shape and bool((self.rows == other.rows).all())
        if not alike or list(self.coefficients) != list(other.coefficients):
            raise DataError(
                f"{where}: the two models have different samples; compare models with the same task and sequence length"
            )
        if not np.allclose(self.weights, other.weights):
            raise DataError(
                f"{where}: the two models count different tokens in the same samples, so their losses cannot be "
                "compared; they need the same tokenizer and chat template"
            )
        if not (np.isfinite(self.sums).all() and np.isfinite(other.sums).all()):
            raise DataError(
                f"{where}: one of the models has a loss that is not finite, so the losses cannot be compared; check "
                "this model"
            )
        coefficients = np.asarray([*self.coefficients.values()], dtype=np.float64)
        return compare(self.sums, other.sums, self.weights, coefficients, confidence)


class SampleRecorder:
    """Records the losses of single samples: computes them on outputs and microbatches cut to one sample at a time.

    Args:
        task: task that computes the losses.
    """

    def __init__(self, task: CheckedTask) -> None:
        self._task = task
        self._rows: dict[str, list[Tensor]] = defaultdict(list)
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def __call__(self, name: str, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> None:
        """Record the losses of each real sample in a microbatch of set ``name``. Does not wait for the device."""
        firsts = microbatch[ROWS]
        texts = len(firsts) // len(microbatch["samples"]) if "samples" in microbatch else 1
        terms = list(self._task.coefficients)
        for place in range(0, len(firsts), texts):
            places = range(place, place + texts)
            one, sample = (only(of, microbatch, places) for of in (outputs, microbatch))
            values = [self._task.losses(one, sample), self._task.weigh(one, sample)]
            self._values[name].append(torch.stack([torch.stack([of[t].float() for t in terms]) for of in values]))
        self._rows[name].append(firsts[::texts])

    def gather(self, name: str, group: dist.ProcessGroup | None) -> SampleLosses:
        """Merge a set's losses over ranks, which may have parts of the same sample. Collective over the group."""
        terms = len(self._task.coefficients)
        own: dict[str, Any] = {"rows": [], "values": []}  # lists, because values are sent as JSON
        if self._rows[name]:
            own["rows"] = torch.cat(self._rows[name]).tolist()
            own["values"] = torch.stack(self._values[name]).double().tolist()
        parts: list[Any] = [own] if group is None else all_gather_objects(own, group)
        rows = np.asarray([row for part in parts for row in part["rows"]], dtype=np.int64)
        values = np.asarray([value for part in parts for value in part["values"]], dtype=np.float64)
        numbers, places = np.unique(rows, return_inverse=True)
        summed = np.zeros((len(numbers), 2, terms))
        np.add.at(summed, places, values.reshape(-1, 2, terms))
        return SampleLosses(numbers, summed[:, 0], summed[:, 1], dict(self._task.coefficients))
