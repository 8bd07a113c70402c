"""Suite of metrics over a stand-in: the samples of each check, and the faults that a check has to notice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from d9d_core.metric import Table, Vector
from d9d_testing.suites import metric as metric_suite
from d9d_testing.suites.metric import MetricSuite
from torch import Tensor

NUMBERS = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0], dtype=torch.float64)


class Extremes:
    """Sum, count, largest and smallest number; parts may be replaced by faulty ones."""

    neutral = (-torch.inf, torch.inf)

    def __init__(self) -> None:
        self.reset()

    @property
    def reductions(self) -> Any:
        return {"sum": "sum", "count": "sum", "most": "max", "least": "min"}

    def update(self, observations: Any) -> None:
        x = observations["x"]
        own = self._state
        self._state = {
            "sum": own["sum"] + x.sum(), "count": own["count"] + len(x), "most": torch.maximum(own["most"], x.max()),
            "least": torch.minimum(own["least"], x.min()),
        }  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        return self._state

    def load_state(self, state: Any) -> None:
        self._state = dict(state)

    def reset(self) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        self._state = {
            "sum": zero.clone(), "count": zero.clone(), "most": zero + self.neutral[0], "least": zero + self.neutral[1],
        }  # fmt: skip

    def compute(self) -> Any:
        own = self._state
        return {"mean": own["sum"] / own["count"].clamp(min=1), "ends": torch.stack([own["least"], own["most"]])}


def suite(kind: Any = Extremes) -> tuple[Any, list[tuple[int, int]]]:
    """Suite of a metric, and the samples that it observes."""
    asked: list[tuple[int, int]] = []

    class Suite(MetricSuite):
        def build(self, **_: Any) -> Any:
            return kind()

        def observations(self, samples: slice) -> Any:
            asked.append((samples.start, samples.stop))
            return {"x": NUMBERS[samples]}

    return Suite(), asked


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("ranks_that_saw_nothing_change_nothing", [(0, 12)] * 4),
        ("largest_and_smallest_values_start_from_neutral_ones", [(0, 12)] * 2),
        ("state_has_its_final_form_from_the_start", [(0, 5)]),
        ("reset_forgets_everything", [(0, 12), (3, 8), (3, 8)]),
        ("a_loaded_state_continues", [(0, 5), (5, 12), (0, 5), (5, 12)]),
        ("a_refused_step_counts_nowhere", [(0, 5), (5, 12)]),
        ("series_keep_their_names", [(0, 5), (5, 12), (0, 12)]),
        ("values_can_be_logged", [(0, 12)]),
        ("vectors_keep_their_series", [(0, 1), (0, 12)]),
        ("states_are_reduced_together", [(0, 5)] * 3),
    ],
)
def test_each_check_observes_these_samples(name: str, asked: list[tuple[int, int]]) -> None:
    made, found = suite()
    getattr(made, f"test_{name}")()
    assert found == asked


def test_samples_are_split_in_eight_ways() -> None:
    made, found = suite()
    made.test_shards_merge_to_the_whole()
    assert found[0] == (0, 12)
    splits = [found[1:][place] for place in range(len(found) - 1)]
    assert sum(stop - start for start, stop in splits) == 8 * 12
    assert sorted(place for start, stop in splits for place in range(start, stop)) == sorted([*range(12)] * 8)


class Mean(Extremes):
    """Adds means of microbatches instead of sums."""

    def update(self, observations: Any) -> None:
        super().update(observations)
        self._state["sum"] = self._state["sum"] - observations["x"].sum() + observations["x"].mean()


class FromZero(Extremes):
    neutral = (0.0, 0.0)


class FromOne(Extremes):
    def reset(self) -> None:
        super().reset()
        self._state["sum"] = self._state["sum"] + 1


class Keeps(Extremes):
    """Forgets one state in a reset only."""

    def reset(self) -> None:
        count = self.__dict__.get("_state", {}).get("count")
        super().reset()
        if count is not None:
            self._state["count"] = count


class Outside(Extremes):
    """Counts updates outside of the state."""

    updates = 0

    def update(self, observations: Any) -> None:
        super().update(observations)
        self.updates += 1

    def compute(self) -> Any:
        return super().compute() | {"updates": torch.tensor(float(self.updates))}


class Grows(Extremes):
    def update(self, observations: Any) -> None:
        super().update(observations)
        self._state["sum"] = self._state["sum"].reshape(1)


class Changes(Extremes):
    def compute(self) -> Any:
        found = super().compute()
        self._state["count"] = self._state["count"] + 1
        return found


class Late(Extremes):
    """Has a series before the first update that is gone afterwards."""

    def compute(self) -> Any:
        return super().compute() | ({} if self._state["count"] else {"empty": torch.zeros(())})


class OfNumber(Extremes):
    """Names a series after the number of samples, or makes a vector of that length."""

    def compute(self) -> Any:
        count = int(self._state["count"])
        return {f"after {count}": torch.zeros(()), "each": torch.zeros(count)}


class Three(Extremes):
    def compute(self) -> Any:
        return {"cube": torch.zeros(1, 1, 1)}


class Flat(Extremes):
    def compute(self) -> Any:
        return {"table": Table(torch.zeros(2), row="a", column="b", unit="c", neutral=0.0)}


class Text(Extremes):
    def compute(self) -> Any:
        return {"text": 3.0}


class Graph(Extremes):
    def compute(self) -> Any:
        return {"graph": torch.zeros((), requires_grad=True) * 2}


class Unknown(Extremes):
    @property
    def reductions(self) -> Any:
        return super().reductions | {"sum": "mean"}


class Unnamed(Extremes):
    @property
    def reductions(self) -> Any:
        return {name: how for name, how in super().reductions.items() if name != "most"}


class Half(Extremes):
    def reset(self) -> None:
        super().reset()
        self._state["count"] = self._state["count"].bfloat16()


class Adds(Extremes):
    """Adds a loaded state to its own."""

    def load_state(self, state: Any) -> None:
        self._state = {**dict(state), "sum": state["sum"] + self._state["sum"]}


class Named(Extremes):
    def compute(self) -> Any:
        count = int(self._state["count"])
        return {"each": Vector(torch.zeros(1), names=(f"of {count}",))}


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (Mean, "shards_merge_to_the_whole", "samples in shards of .*: mean is .*; merge sums and counts"),
        (FromOne, "ranks_that_saw_nothing_change_nothing", "merged with a new one: mean is .*; start from the"),
        (Keeps, "ranks_that_saw_nothing_change_nothing", "merged with a reset one: mean is .*; start from the"),
        (FromZero, "largest_and_smallest_values_start_from_neutral_ones", "start it from the largest value of its"),
        (Keeps, "reset_forgets_everything", r"reset\(\) leaves \['count'\] of the state"),
        (Outside, "reset_forgets_everything", "after reset.*: updates is .*; reset attributes outside"),
        (Outside, "a_loaded_state_continues", "resumed: updates is .*; keep all that compute.. needs in state"),
        (Grows, "state_has_its_final_form_from_the_start", "after an update the state is .*; it must not change form"),
        (Unknown, "state_has_its_final_form_from_the_start", "reductions {'sum': 'mean'} are unknown; use one"),
        (Unnamed, "state_has_its_final_form_from_the_start", "state has .* reductions say .*; name all"),
        (Adds, "a_refused_step_counts_nowhere", r"\['sum'\] keep the update of a refused step; load_state"),
        (Changes, "series_keep_their_names", "computed twice: mean is .*; compute.. must not change anything"),
        (Late, "series_keep_their_names", r"before the first update there are series \['empty'\] that"),
        (OfNumber, "series_keep_their_names", "series of samples .* are .*'after 7', 'each'.*, of others .*'after 5'"),
        (Three, "values_can_be_logged", r"cube has shape \(1, 1, 1\); return 0-d or 1-D tensors, or a Table"),
        (Flat, "values_can_be_logged", r"table table has shape \(2,\); it needs two dims"),
        (Text, "values_can_be_logged", "text is a float; return tensors, Vectors or Tables"),
        (Graph, "values_can_be_logged", "graph carries a graph; detach the observations"),
        (OfNumber, "vectors_keep_their_series", "the values of each are 1, before they were 0; keep all of them"),
        (Named, "vectors_keep_their_series", r"the values of each are \('of 1',\), before they were \('of 0',\)"),
        (Half, "states_are_reduced_together", "state count of dtype torch.bfloat16 cannot be reduced by every backend"),
    ],
)  # fmt: skip
def test_faulty_metrics_are_noticed(kind: Any, name: str, says: str) -> None:
    made, _ = suite(kind)
    with pytest.raises(AssertionError, match=says):
        getattr(made, f"test_{name}")()


def test_values_may_differ_by_rounding_only() -> None:
    one = {"a": torch.tensor([1.0, torch.nan], dtype=torch.float64)}
    for off, same in ((9e-6, True), (1.2e-5, False)):
        other = {"a": one["a"] + off}
        if same:
            metric_suite._assert_same(other, one, "here", "hint")
        else:
            with pytest.raises(AssertionError, match="here: a is .*, expected .*; hint"):
                metric_suite._assert_same(other, one, "here", "hint")
    tiny = {"a": torch.zeros(1)}
    metric_suite._assert_same({"a": torch.full((1,), 9e-8)}, tiny, "here", "hint")
    with pytest.raises(AssertionError, match="here: a is"):
        metric_suite._assert_same({"a": torch.full((1,), 1.2e-7)}, tiny, "here", "hint")
    with pytest.raises(AssertionError, match=r"here: series \['b'\], expected \['a'\]"):
        metric_suite._assert_same({"b": tiny["a"]}, tiny, "here", "hint")


def test_merged_states_are_reduced_by_their_operation() -> None:
    made, _ = suite()
    parts = [made.updated([slice(*cut)]) for cut in itertools.pairwise((0, 4, 5, 12))]
    merged = made.merged(parts)
    assert merged["mean"].item() == pytest.approx(NUMBERS.mean().item())
    assert merged["ends"].tolist() == [1.0, 9.0]
