"""Metrics in whole jobs: in training and evaluation, over several processes, and their cost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_engine.run.trainer import Trainer
from d9d_engine.step.metrics import Statistics
from d9d_nn.ops import linear_cross_entropy as op
from d9d_qwen3.config import tiny
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.logs import read_log
from d9d_testing.suites.support.component import build_component
from d9d_testing.suites.support.observations import observed
from d9d_testing.toy.runs import assert_identical, final_tensors
from d9d_testing.world import World
from torch import Tensor
from torch import distributed as dist

PLUGINS = [
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_metrics.plugin", "d9d_parallel.plugin",
    "d9d_pipeline.plugin", "d9d_qwen3.plugin", "d9d_testing.toy.plugin",
]  # fmt: skip
LOSS = {"values": "token_loss", "mask": "targets"}
#: One of each kind that a language model can have.
METRICS: list[Any] = [
    "perplexity",
    {"name": "token_accuracy", "top": [1, 5]},
    {"name": "sum", **LOSS},
    {"name": "mean", **LOSS},
    {"name": "max", **LOSS},
    {"name": "min", **LOSS},
    {"name": "compose", "metrics": {"mine": {"name": "mean", **LOSS}, "best": {"name": "token_accuracy", "top": [5]}}},
]


def values_of(directory: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(directory)},
        "device": "cpu",
        "model": tiny().model_dump(),
        "task": "causal_lm",
        "data": "toy_tokens",
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "batch": {"size": 8, "microbatch": 2},
        "steps": 2,
        "trackers": [{"name": "jsonl", "picture": False}],
        "logging": {"every": 4},
        "export": False,
        **sections,
    }


def trained(directory: Path, **sections: Any) -> Trainer:
    trainer = job_of(values_of(directory, **sections), PLUGINS).build(lambda _note: None)
    trainer.train()
    return trainer


@pytest.mark.thorough
def test_every_metric_is_logged_in_training_and_in_evaluation(tmp_path: Path) -> None:
    evaluation = {"every": 2, "packs": 2, "data": "toy_tokens", "metrics": METRICS}
    trained(tmp_path, metrics=METRICS, evaluation=evaluation)
    lines = read_log(tmp_path / "run")
    (evaluated,) = [line for line in lines if "eval/loss" in line]
    found = {name.removeprefix("eval/"): value for name, value in evaluated.items()}
    for line in ({**lines[0], "loss": lines[0]["loss"]}, found):
        assert line["mean_token_loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert line["perplexity"] == pytest.approx(math.exp(line["mean_token_loss"]), rel=1e-6)
        assert line["mine/mean_token_loss"] == line["mean_token_loss"]
        assert line["min_token_loss"] < line["mean_token_loss"] < line["max_token_loss"]
        assert 0 <= line["token_accuracy_top_1"] <= line["token_accuracy_top_5"] <= 1
        assert line["best/token_accuracy_top_5"] == line["token_accuracy_top_5"]


@pytest.mark.thorough
def test_token_accuracy_is_that_of_full_logits(tmp_path: Path) -> None:
    metric = {"name": "token_accuracy", "top": [1, 5, 20]}
    trainer = trained(tmp_path, evaluation={"every": 2, "packs": 2, "data": "toy_tokens", "metrics": [metric]})
    evaluator = trainer.evaluator
    assert evaluator is not None
    found = evaluator.run()
    (data,) = evaluator.sets
    hits, count = torch.zeros(3), 0
    for _ in range(2):
        for microbatch in data.prefetcher.next():
            with torch.no_grad():
                logits = trainer.stage.eval()(tokens=microbatch["tokens"])["logits"].flatten(0, 1)
            targets = microbatch["targets"].flatten()
            best = logits.topk(20).indices == targets.unsqueeze(1)
            hits += torch.stack([best[:, :top].any(1).sum() for top in (1, 5, 20)])
            count += int((targets >= 0).sum())
    data.prefetcher.close()
    for top, share in zip((1, 5, 20), (hits / count).tolist(), strict=True):
        assert found[f"eval/token_accuracy_top_{top}"] == pytest.approx(share, abs=1e-6)
    assert 0 < hits[0] < hits[2] < count


@pytest.mark.thorough
def test_ranks_change_no_bit_of_a_run_and_are_counted_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    chunk_ranks = op._chunk_ranks
    monkeypatch.setattr(op, "_chunk_ranks", lambda *a: calls.append(True) or chunk_ranks(*a))
    plain = trained(tmp_path / "plain", metrics=["perplexity"])
    assert not calls
    ranked = trained(tmp_path / "ranked", metrics=["perplexity", "token_accuracy"])
    in_training = len(calls)
    assert in_training == 2 * 4  # steps and microbatches
    assert_identical(
        *({n: t for n, t in final_tensors(one.job).items() if "token_acc" not in n} for one in (plain, ranked))
    )
    calls.clear()
    evaluation = {"every": 2, "packs": 1, "data": "toy_tokens", "metrics": ["token_accuracy"]}
    trained(tmp_path / "evaluated", evaluation=evaluation)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (
            {"name": "mean", "values": "tokenloss"},
            "did you mean 'token_loss'? the task observes: hidden_states, targets, token_loss",
        ),
        ({"name": "confusion", "problem": {"kind": "binary"}}, "metric 'confusion' (d9d-metrics"),
        ({"name": "compose", "metrics": {"a": {"name": "sum", "values": "nothing"}}}, "reads nothing, which task"),
    ],
)
def test_an_observation_that_the_task_lacks_is_named_before_anything_is_built(
    tmp_path: Path, metric: dict[str, Any], text: str
) -> None:
    for section in ({"metrics": [metric]}, {"evaluation": {"every": 1, "data": "toy_tokens", "metrics": [metric]}}):
        with pytest.raises(JobError) as error:
            job_of(values_of(tmp_path, **section), PLUGINS).plan()
        assert text in str(error.value)


def test_classes_of_a_classification_are_series(tmp_path: Path) -> None:
    problem = {"kind": "multiclass", "num_classes": 5}
    fields: dict[str, Any] = {
        "problem": problem,
        "statistics": ["f1"],
        "averages": ["per_class", "macro"],
        "class_names": list("abcde"),
    }
    statistics = Statistics({"mine": build_component("metric", "d9d_metrics.plugin", "confusion", fields)}, gated=False)
    statistics.update(observed(slice(0, 12)))
    computed = statistics.compute()
    assert list(computed) == [f"f1/{name}" for name in "abcde"] + ["f1_macro"]
    assert all(isinstance(value, Tensor) and value.ndim == 0 for value in computed.values())


@pytest.mark.full
def test_d9d_evaluate_measures_what_training_does(d9d: Any, small_job: Any, tmp_path: Path) -> None:
    data = {"name": "text", "sources": [str(tmp_path / "corpus")], "sequence_length": 32}
    evaluation = {"every": 2, "packs": "all", "data": data, "metrics": METRICS}
    job = small_job(steps=2, evaluation=evaluation, export=False, lr_schedule=None)
    status, _, err = d9d("train", str(job))
    assert status == 0, err
    (logged,) = [line for line in read_log(tmp_path / "runs" / "small") if "eval/loss" in line]
    status, out, err = d9d("evaluate", str(job), "--json", "-")
    assert status == 0, err
    found = json.loads(out)["sets"]["evaluation"]
    names = [name for name in logged if name.startswith("eval/")]
    assert len(names) >= 9
    for name in names:
        assert found[name.removeprefix("eval/")] == pytest.approx(logged[name], rel=1e-5), name


@pytest.mark.thorough
def test_classes_are_measured_as_scikit_learn_does(tmp_path: Path) -> None:
    sk = pytest.importorskip("sklearn.metrics")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n * 7}", "label": n * n % 3}) + "\n" for n in range(21)))
    data = {"name": "labelled", "sources": [str(texts)], "sequence_length": 8}
    problem = {"kind": "multiclass", "num_classes": 3}
    metric = {"name": "confusion", "problem": problem, "statistics": ["f1", "accuracy"], "averages": ["macro", "micro"]}
    model = {
        **tiny().model_dump(),
        "vocab_size": 257,
        "heads": {"classes": {"kind": "classification", "num_classes": 3}},
    }
    trainer = trained(
        tmp_path, model=model, task="classification", data=data, metrics=[metric],
        evaluation={"every": 2, "packs": "all", "data": data, "metrics": [metric]},
    )  # fmt: skip
    assert trainer.evaluator is not None
    seen: list[tuple[Tensor, Tensor]] = []
    trainer.evaluator._seen = lambda _set, outputs, batch: seen.append((outputs["class_logits"], batch["labels"]))
    found = trainer.evaluator.run()
    logits, labels = (torch.cat(column) for column in zip(*seen, strict=True))
    assert len(labels) == 21
    predicted = logits.argmax(-1)
    assert found["eval/accuracy_micro"] == pytest.approx(sk.accuracy_score(labels, predicted))
    assert found["eval/f1_macro"] == pytest.approx(sk.f1_score(labels, predicted, average="macro"))
    assert {"f1_macro", "f1_micro", "accuracy_macro", "accuracy_micro"} <= read_log(tmp_path / "run")[0].keys()


# --- several processes


def ten_metrics() -> dict[str, Any]:
    fields: list[tuple[str, dict[str, Any]]] = [
        *((name, LOSS) for name in ("sum", "mean", "max", "min")),
        ("weighted_mean", {"values": "token_loss", "weights": "weights"}),
        ("token_accuracy", {}),
        *(
            ("confusion", {"problem": {"kind": "multiclass", "num_classes": 5}, "averages": [average]})
            for average in ("micro", "macro", "weighted")
        ),
        ("compose", {"metrics": {"a": {"name": "mean", **LOSS}}}),
    ]
    return {f"{i}": build_component("metric", None, name, of) for i, (name, of) in enumerate(fields)}


def computed_on(ranks: int, empty: bool) -> dict[str, float]:
    """Values of all metrics over twelve samples dealt to ranks, and the number of all-reduces."""
    rank = dist.get_rank()
    statistics = Statistics(ten_metrics(), gated=False, group=dist.group.WORLD)
    for index in range(12):
        if (0 if empty else index % ranks) == rank:
            statistics.update(observed(slice(index, index + 1)))
    calls: list[torch.dtype] = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: calls.append(tensor.dtype) or reduce(tensor, *a, **k)
    try:
        values = {name: value.item() for name, value in statistics.compute().items()}  # type: ignore[union-attr]
    finally:
        dist.all_reduce = reduce
    return {**values, "all-reduces": len(calls), "states": len([k for m in ten_metrics().values() for k in m.state()])}


@pytest.mark.full
@pytest.mark.parametrize("empty", [False, True])
def test_four_processes_compute_what_one_does_with_an_all_reduce_for_each_kind(empty: bool) -> None:
    (expected,) = World(1).run(computed_on, 1, empty)
    for found in World(4).run(computed_on, 4, empty):
        assert found.keys() == expected.keys()
        assert found == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}
        assert found["all-reduces"] == 4  # sums of float64 and of int64, maxima and minima of float64
        assert found["states"] == 26


def train_here(values: dict[str, Any]) -> int:
    job = job_of(values, PLUGINS)
    return job.build(lambda _note: None, topology=topology_here(job)).train().step


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [{"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]}, {"mesh": {"pp": 2}, "pipeline": "1f1b"}]
)
def test_a_period_goes_on_over_a_resume_on_another_number_of_processes(tmp_path: Path, layout: dict[str, Any]) -> None:
    """The period of steps 2 to 4 is begun on two processes and ended on one."""
    evaluation = {"every": 4, "packs": 2, "data": "toy_tokens", "metrics": METRICS}
    common: dict[str, Any] = {"metrics": METRICS, "evaluation": evaluation}
    trained(tmp_path / "whole", steps=4, **common)
    World(2).run(train_here, values_of(tmp_path / "cut", steps=3, **common, **layout))
    trained(tmp_path / "cut", steps=4, **common)
    expected, found = (
        {name: value for line in read_log(tmp_path / name / "run") if line["step"] == 4 for name, value in line.items()}
        for name in ("whole", "cut")
    )
    assert found.keys() == expected.keys()
    for name in sorted(found.keys() - {"tokens_per_second"}):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    assert json.dumps(found)
