"""How layers are shared by pipeline stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_nn.stages import stage_layers
from hypothesis import given
from hypothesis import strategies as st

COST = st.floats(0, 12, allow_subnormal=False)


def split(layers: int, count: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    parts = [stage_layers(layers, Stage(index, count), first=first, last=last) for index in range(count)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    return [len(part) for part in parts]


def largest(counts: list[int], first: float, last: float) -> float:
    costs = [float(count) for count in counts]
    costs[0] += first
    costs[-1] += last
    return max(costs)


def every_split(layers: int, count: int) -> list[list[int]]:
    cuts = ([0, *cut, layers] for cut in combinations(range(1, layers), count - 1))
    return [[end - start for start, end in pairwise(cut)] for cut in cuts]


@given(layers=st.integers(1, 100), count=st.integers(1, 20))
def test_without_costs_sizes_differ_by_one_and_the_first_stages_take_the_rest(layers: int, count: int) -> None:
    if count <= layers:
        size, rest = divmod(layers, count)
        assert split(layers, count) == [size + 1] * rest + [size] * (count - rest)


@given(layers=st.integers(1, 9), count=st.integers(1, 5), first=COST, last=COST)
def test_no_other_split_has_a_cheaper_costliest_stage(layers: int, count: int, first: float, last: float) -> None:
    if count <= layers:
        found = split(layers, count, first, last)
        assert min(found) >= 1
        best = min(largest(other, first, last) for other in every_split(layers, count))
        assert largest(found, first, last) == pytest.approx(best)


def test_stages_with_an_embedding_or_a_head_get_fewer_layers() -> None:
    assert split(12, 4, first=1, last=3) == [3, 4, 4, 1]
    assert split(12, 4, first=0.25) == [3, 3, 3, 3]
    assert split(4, 4, last=10) == [1, 1, 1, 1]
    assert split(5, 1, first=2, last=2) == [5]


def test_a_thousand_stages_are_split() -> None:
    assert len(stage_layers(4096, Stage(1023, 1024), first=0.3, last=2.5)) == 2


def test_the_job_may_say_how_many_layers_each_stage_has() -> None:
    given_counts = (1, 4, 2)
    parts = [stage_layers(7, Stage(index, 3, given_counts), last=9) for index in range(3)]
    assert parts == [range(1), range(1, 5), range(5, 7)]


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (Stage(0, 3), "2 layers cannot be split over 3 pipeline stages.* lower mesh.pp or pipeline.stages_per_rank"),
        (
            Stage(0, 2, (2,)),
            "pipeline.layers has 1 numbers, but there are 2 stages; give one for each stage, or remove",
        ),
        (Stage(0, 2, (2, 1)), r"pipeline.layers is \[2, 1\], 3 in all, but the model has 2 layers; .* 2 in all"),
        (Stage(0, 2, (2, 0)), r"pipeline.layers is \[2, 0\], 2 in all, .*give each stage one or more"),
    ],
)
def test_impossible_splits_say_what_to_change(stage: Stage, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        stage_layers(2, stage)
