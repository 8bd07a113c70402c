"""Evaluation with stand-ins of task and executor: exact means, counted samples, and real samples of one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import DataError
from d9d_core.metric import Table
from d9d_core.types import Pack
from d9d_engine.run import evaluation as module
from d9d_engine.run.evaluation import EvaluationSet, Evaluator, series_of_sets
from d9d_engine.run.real_samples import RealSamples, only
from torch import Tensor, nn


class Task:
    """Sums are the sum of the scores and ten times it; weights are the number of rows and the number of scores >= 2."""

    def __init__(self, terms: Sequence[str]) -> None:
        self.coefficients = dict(zip(terms, (1.0, 0.5), strict=False))

    def losses(self, outputs: Mapping[str, Tensor], _microbatch: object) -> dict[str, Tensor]:
        score = outputs["score"]
        return {"z": 10 * score.sum(), "nll": score.sum()}

    def weigh(self, outputs: Mapping[str, Tensor], _microbatch: object) -> dict[str, Tensor]:
        score = outputs["score"]
        return {"z": (score >= 2).sum(), "nll": torch.tensor(len(score))}

    def observations(self, outputs: Mapping[str, Tensor], _microbatch: object) -> Mapping[str, Tensor]:
        return outputs


class Executor:
    """Passes on the input as the output, unless this rank lacks the last stage."""

    def __init__(self, last: bool = True, context_ranks: int = 1) -> None:
        self.last, self.topology = last, SimpleNamespace(sizes={"cp": context_ranks})

    def evaluate(self, pack: Pack, measure: Callable[[Any, Any], None]) -> None:
        for microbatch in pack if self.last else ():
            measure({"score": microbatch["score"].float()}, microbatch)


class Prefetcher:
    """Packs in order; the state is the number of the next one."""

    def __init__(self, packs: Sequence[Pack], at: int = 0, real: RealSamples | None = None) -> None:
        self.packs, self.at, self.loaded, self.real = packs, at, list[object](), real

    def next(self) -> Pack:
        self.at += 1
        return self.packs[self.at - 1] if self.real is None else self.real.next_pack()

    def state(self) -> int:
        return self.at

    def load_state(self, state: int) -> None:
        self.loaded.append(state)
        self.at = state


class Statistics:
    """Metric that sums scores, as a number and as a table."""

    def __init__(self) -> None:
        self.total = 99.0

    def reset(self) -> None:
        self.total = 0.0

    def update(self, observations: Mapping[str, Tensor]) -> None:
        self.total += observations["score"].sum().item()

    def compute(self) -> Mapping[str, Any]:
        return {"total": torch.tensor(self.total), "cells": Table(torch.tensor([[self.total, 1.0]]))}


def packs(*scores: Sequence[Sequence[float]]) -> list[Pack]:
    return [[{"score": torch.tensor(rows)} for rows in pack] for pack in scores]


def set_of(found: Sequence[Pack], name: str = "", **given: Any) -> EvaluationSet:
    return EvaluationSet(cast("Any", Prefetcher(found)), len(found), name, **given)


def evaluator(*sets: EvaluationSet, terms: Sequence[str] = ("nll",), **given: Any) -> Evaluator:
    executor, model = given.pop("executor", Executor()), given.pop("model", nn.Linear(1, 1))
    return Evaluator(cast("Any", Task(terms)), executor, model, sets, **given)


PACKS = packs([[1.0, 3.0], [2.0]], [[4.0, 1.0, 1.0]])


def test_the_loss_is_the_mean_over_all_packs() -> None:
    model, beats = nn.Linear(1, 1), list[int]()
    made = evaluator(set_of(PACKS), model=model, beat=lambda: beats.append(model.training))
    assert made.run() == {"eval/loss": 2.0}  # 12 of 6 rows
    assert (made.counted, beats, model.training) == ({"": 6}, [False, False], True)
    prefetcher: Any = made.sets[0].prefetcher
    assert (prefetcher.loaded, prefetcher.at) == ([0], 0)
    model.eval()
    assert made.run() == {"eval/loss": 2.0}
    assert not model.training


def test_several_terms_have_series_of_their_own_and_make_the_loss() -> None:
    made = evaluator(set_of(PACKS), terms=("nll", "z"), likelihood="nll")
    # z: 120 over the three scores of at least 2.
    assert made.run() == {"eval/loss": 22.0, "eval/perplexity": math.exp(2.0), "eval/nll": 2.0, "eval/z": 40.0}
    without = evaluator(set_of(packs([[1.0]])), terms=("nll", "z"))
    assert without.run() == {"eval/loss": 1.0, "eval/nll": 1.0, "eval/z": 0.0}
    assert evaluator(set_of(packs([[1000.0]])), likelihood="nll").run()["eval/perplexity"] == math.inf


def test_several_sets_and_their_metrics_are_told_apart() -> None:
    tables: list[Mapping[str, Table]] = []
    seen: list[tuple[str, float]] = []
    made = evaluator(
        set_of(PACKS, "a", statistics=Statistics()),
        set_of(packs([[7.0]]), "b"),
        seen=lambda name, outputs, _microbatch: seen.append((name, outputs["score"].sum().item())),
    )
    assert made.run(tables.append) == {"eval/a/loss": 2.0, "eval/b/loss": 7.0, "eval/a/total": 12.0}
    assert made.counted == {"a": 6, "b": 1}
    ((name, table),) = tables[0].items()
    assert (name, table.values.tolist()) == ("eval/a/cells", [[12.0, 1.0]])
    assert seen == [("a", 4.0), ("a", 2.0), ("a", 6.0), ("b", 7.0)]
    tables.clear()
    evaluator(set_of(PACKS)).run(tables.append)
    assert tables == []


def test_all_ranks_count_and_context_parallel_ranks_share_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(totals: Tensor, group: object) -> None:
        assert group == "group"
        totals += torch.tensor([[[6.0, 4.0], [2.0, 4.0]]])

    monkeypatch.setattr(module, "dist", SimpleNamespace(all_reduce=reduce))
    made = evaluator(set_of(PACKS), executor=Executor(context_ranks=2), group="group")
    assert made.run() == {"eval/loss": 18.0 / 8}
    assert made.counted == {"": 5}
    empty = evaluator(set_of(PACKS), executor=Executor(last=False), group="group")
    assert empty.run() == {"eval/loss": 3.0}
    assert empty.counted == {"": 4}


def test_a_first_pass_adds_its_tensors_before_the_loss() -> None:
    def first_pass(pack: Pack, step: int | None) -> Pack:
        assert step is None
        return [{"score": microbatch["score"] * 2} for microbatch in pack]

    assert evaluator(set_of(PACKS, first_pass=first_pass)).run() == {"eval/loss": 4.0}


class Pass:
    """Stream of one pass: rows 0 to 4, the rest fillers; row r has the score r + 1."""

    def __init__(self, rows: Sequence[Sequence[int]], facts: Mapping[str, object], texts: int = 1) -> None:
        self.rows, self.facts, self.texts, self.at = rows, facts, texts, 0

    def next_pack(self) -> Pack:
        rows = torch.tensor(self.rows[self.at])
        self.at += 1
        samples = {"samples": rows[:: self.texts]} if self.texts > 1 else {}
        return [{"rows": rows, "score": rows + 1.0, **samples}]

    def state(self) -> Any:
        return self.at

    def load_state(self, state: Any) -> None:
        self.at = state

    def save_assets(self, directory: Any) -> None:
        self.saved = directory


def real(rows: Sequence[Sequence[int]], samples: object = 5, texts: int = 1, limit: int | None = None) -> RealSamples:
    return RealSamples(cast("Any", Pass(rows, {"rows": 9, "samples": samples}, texts)), "evaluation.data", limit)


def test_fillers_are_left_out_of_losses_metrics_and_counts() -> None:
    stream = real([[0, 1, 2], [3, 4, -1], [-1, -1, -1]])
    statistics, seen = Statistics(), list[list[float]]()
    one = EvaluationSet(
        cast("Any", Prefetcher([], real=stream)), 3, "", cast("Any", statistics), real=stream
    )  # fmt: skip
    made = evaluator(one, seen=lambda _name, outputs, _microbatch: seen.append(outputs["score"].tolist()))
    assert made.run() == {"eval/loss": 3.0, "eval/total": 15.0}
    assert made.counted == {"": 5}
    assert seen == [[1.0, 2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("limit", "samples", "places"),
    [(None, 5, [[0, 1, 2], [0, 1]]), (4, 4, [[0, 1, 2], [0]]), (9, 5, [[0, 1, 2], [0, 1]])],
)
def test_a_limit_counts_samples_below_it(limit: int | None, samples: int, places: list[list[int]]) -> None:
    stream = real([[0, 1, 2], [3, 4, -1]], limit=limit)
    assert stream.samples == samples
    stream.next_pack()
    stream.next_pack()
    assert [stream.take(), stream.take()] == [[place] for place in places]


def test_all_texts_of_a_sample_are_real_or_none() -> None:
    stream = real([[0, -1, 3, 4, -1, -1]], texts=2)
    stream.next_pack()
    assert stream.take() == [[0, 1, 2, 3]]
    limited = real([[0, 1, 2, 3, 4, 5]], texts=2, limit=3)
    limited.next_pack()
    assert limited.take() == [[0, 1, 2, 3]]


def test_a_position_drops_what_was_fetched_ahead_and_the_rest_is_the_stream_s() -> None:
    stream = real([[0, 1], [2, 3]])
    stream.next_pack()
    assert cast("Any", stream.state()) == 1
    stream.load_state(cast("Any", 0))
    stream.next_pack()
    assert stream.take() == [[0, 1]]
    with pytest.raises(IndexError):
        stream.take()
    stream.save_assets(cast("Any", "directory"))
    assert (stream.facts["samples"], cast("Any", stream)._stream.saved) == (5, "directory")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"samples": 5}, "cannot make one pass .* 'packs: 8'"),
        ({"rows": 5}, "there are no samples to make a pass over"),
        ({"rows": 5, "samples": 0}, "there are no samples to make a pass over"),
    ],
)
def test_data_without_a_pass_is_refused(facts: Mapping[str, object], text: str) -> None:
    with pytest.raises(DataError, match=f"^evaluation.data: .*{text}"):
        RealSamples(cast("Any", Pass([], facts)), "evaluation.data")
    assert real([], samples=1).samples == 1


def test_scattered_places_are_taken_in_order() -> None:
    microbatch = {"rows": torch.tensor([0, 1, 2, 3]), "x": torch.arange(8).reshape(4, 2), "n": torch.tensor(7)}
    taken = only(microbatch, microbatch, [0, 2, 3])
    assert (taken["x"].tolist(), taken["n"].item()) == ([[0, 1], [4, 5], [6, 7]], 7)
    pairs = {"rows": torch.arange(6), "samples": torch.tensor([5, 6, 7]), "x": torch.arange(6)}
    taken = only(pairs, pairs, [0, 1, 4, 5])
    assert (taken["samples"].tolist(), taken["x"].tolist()) == ([5, 7], [0, 1, 4, 5])


def test_series_that_sets_always_log() -> None:
    assert list(series_of_sets(["", "b"], ["nll"], None)) == ["eval/loss", "eval/b/loss"]
    assert list(series_of_sets(["b"], ["nll", "z"], "nll")) == [
        "eval/b/loss", "eval/b/perplexity", "eval/b/nll", "eval/b/z",
    ]  # fmt: skip
