"""Losses of single samples: recorded from microbatches, merged, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from d9d_core.errors import DataError
from d9d_inference.evaluation import samples
from d9d_inference.evaluation.samples import SampleLosses, SampleRecorder
from torch import Tensor


class Task:
    """Task of two loss terms."""

    coefficients: Mapping[str, float] = {"main": 1.0, "extra": 0.5}

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"extra": outputs["x"].sum() * 10, "main": outputs["x"].sum()}

    def weigh(self, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"main": microbatch["weights"].sum(), "extra": torch.tensor(1)}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> SampleRecorder:
    def only(of: Mapping[str, Tensor], _microbatch: object, places: range) -> dict[str, Tensor]:
        return {name: tensor[places.start : places.stop] for name, tensor in of.items() if name != "samples"}

    monkeypatch.setattr(samples, "only", only)
    task: Any = Task()
    return SampleRecorder(task)


def batch(rows: list[int], weights: list[float], **more: Any) -> Any:
    return {"rows": torch.tensor(rows), "weights": torch.tensor(weights), **more}


def test_each_sample_has_its_terms_and_parts_of_a_sample_add_up(recorder: SampleRecorder) -> None:
    recorder("a", {"x": torch.tensor([1.0, 2.0])}, batch([7, 3], [1.0, 4.0]))
    recorder("a", {"x": torch.tensor([0.5])}, batch([7], [2.0]))
    recorder("b", {"x": torch.tensor([9.0])}, batch([0], [1.0]))
    found = recorder.gather("a", None)
    assert found.rows.tolist() == [3, 7]
    assert found.sums.tolist() == [[2.0, 20.0], [1.5, 15.0]]
    assert found.weights.tolist() == [[4.0, 1.0], [3.0, 2.0]]
    assert found.coefficients == {"main": 1.0, "extra": 0.5}
    assert recorder.gather("b", None).rows.tolist() == [0]
    none = recorder.gather("none", None)
    assert (none.rows.shape, none.sums.shape) == ((0,), (0, 2))


def test_texts_of_a_sample_are_one_row(recorder: SampleRecorder) -> None:
    pairs = batch([4, 4, 6, 6], [1.0, 1.0, 1.0, 1.0], samples=torch.zeros(2))
    recorder("a", {"x": torch.tensor([1.0, 2.0, 3.0, 4.0])}, pairs)
    found = recorder.gather("a", None)
    assert (found.rows.tolist(), found.sums[:, 0].tolist()) == ([4, 6], [3.0, 7.0])


def test_losses_of_all_ranks_are_merged(recorder: SampleRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder("a", {"x": torch.tensor([1.0])}, batch([7], [1.0]))
    other = {"rows": [2, 7], "values": [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 4.0]]]}
    monkeypatch.setattr(samples, "all_gather_objects", lambda own, _group: [own, {"rows": [], "values": []}, other])
    group: Any = SimpleNamespace()
    found = recorder.gather("a", group)
    assert found.rows.tolist() == [2, 7]
    assert found.sums.tolist() == [[1.0, 2.0], [2.0, 12.0]]


def losses(rows: list[int] | None = None, weight: float = 1.0, off: float = 0.0, **coefficients: float) -> SampleLosses:
    numbers = np.asarray(range(6) if rows is None else rows)
    sums = np.arange(len(numbers), dtype=np.float64)[:, None] + off
    return SampleLosses(numbers, sums, np.full((len(numbers), 1), weight), coefficients or {"main": 1.0})


def test_the_difference_is_of_these_losses_minus_the_others() -> None:
    found = losses(off=0.5).difference(losses(), "set")
    assert (found.mean, found.samples, found.confidence) == (pytest.approx(0.5), 6, 0.95)
    assert losses(off=0.5, main=2.0).difference(losses(main=2.0), "set").mean == pytest.approx(1.0)
    assert losses().difference(losses(), "set", 0.5).confidence == 0.5


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (losses([0, 1, 2, 3, 4]), "set: the two models have different samples"),
        (losses([0, 1, 2, 3, 4, 9]), "set: the two models have different samples"),
        (losses(other=1.0), "set: the two models have different samples"),
        (losses(weight=2.0), "set: the two models count different tokens"),
        (losses(off=float("nan")), "set: one of the models has a loss that is not finite"),
    ],
)
def test_losses_that_cannot_be_compared_are_refused(other: SampleLosses, said: str) -> None:
    with pytest.raises(DataError, match=said):
        losses().difference(other, "set")
    with pytest.raises(DataError, match=said):
        other.difference(losses(), "set")
