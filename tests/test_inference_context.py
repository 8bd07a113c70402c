"""Inference where ranks share the positions of samples: rows equal the rows of one process, whatever a task keeps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d9d_inference.job import InferenceJob
from d9d_testing.layouts import topology_here
from d9d_testing.world import RankFailedError, World

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs")
COUNT, LENGTH = 13, 64
TASKS: dict[str, dict[str, Any]] = {
    "log_probs": {"name": "log_probs", "per": "token", "head": "lm"},
    "perplexity": {"name": "perplexity", "head": "lm"},
    "classes": {"name": "classes", "head": "topic"},
    "token_classes": {"name": "token_classes", "head": "tags"},
    "embeddings": {"name": "embeddings", "head": "vector"},
    "hidden_states": {"name": "hidden_states", "layers": [0, -1], "pooling": "none"},
}
HEADS = {
    "lm": {"kind": "causal_lm"},
    "topic": {"kind": "classification", "num_classes": 3, "pooling": "last"},
    "tags": {"kind": "token_classification", "num_classes": 4},
    "vector": {"kind": "embedding", "pooling": "mean"},
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory, published: Callable[..., Path]) -> Callable[..., dict[str, Any]]:
    path = tmp_path_factory.mktemp("inference-context")
    model, draw = published(path / "model"), random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 10)))[:60] for _ in range(COUNT)]
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(name: str, task: Mapping[str, Any], packed: bool, **sections: Any) -> dict[str, Any]:
        shape = {"name": "text", "packing": "best_fit", "field": "text"} if packed else {"name": "documents"}
        return {
            "run": {"name": name, "dir": str(path / "runs")}, "device": "cpu", "task": dict(task),
            "model": {"name": "qwen3", "pretrained": str(model), "heads": HEADS},
            "data": {**shape, "sources": [str(path / "texts.jsonl")], "sequence_length": LENGTH},
            "batch": {"size": 4, "microbatch": 2}, **sections,
        }  # fmt: skip

    return make


def infer(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Run inference jobs one after the other; runs on every rank of a world."""
    for job_values in jobs:
        job = InferenceJob.from_values(dict(job_values))
        job.build(lambda _: None, topology_here(job)).run()  # type: ignore[arg-type]


def rows_of(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    output = Path(job["run"]["dir"]) / job["run"]["name"] / "output.jsonl"
    return [json.loads(line) for line in output.read_text().splitlines()]


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["row"] for row in found] == list(range(COUNT)) == [row["row"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        for name, value in other.items():
            array = np.asarray(value)
            if array.dtype.kind == "f":
                # Hidden states reach 30, and small ones are sums of such: only large values are rounded.
                rounding = 3e-6 * max(1.0, float(np.abs(array).max(initial=0.0)))
                np.testing.assert_allclose(row[name], value, rtol=1e-5, atol=rounding, err_msg=name)
            else:
                assert row[name] == value, name


def compare(
    values: Callable[..., dict[str, Any]],
    ranks: int,
    layouts: Mapping[str, Mapping[str, Any]],
    *cases: tuple[str, bool],
) -> None:
    """Compare rows of layouts with the rows of one process."""
    pairs = []
    for task, packed in cases:
        alone = values(f"{task}-{packed}-alone-{'-'.join(layouts)}", TASKS[task], packed)
        InferenceJob.from_values(alone).build(note=lambda _: None).run()
        pairs += [
            (values(f"{task}-{packed}-{name}", TASKS[task], packed, **sections), alone)
            for name, sections in layouts.items()
        ]
    World(ranks, timeout=240.0).run(infer, [job for job, _ in pairs])
    for job, alone in pairs:
        assert_alike(rows_of(job), rows_of(alone))


def context(method: str, *others: str, **mesh: int) -> dict[str, Any]:
    return {"mesh": {"cp": 2, **mesh}, "parallel": [{"name": "context_parallel", "method": method}, *others]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "tasks", [["log_probs"], pytest.param(list(TASKS), marks=pytest.mark.full)], ids=["log_probs", "all"]
)
def test_rows_of_each_task_equal_those_of_one_process(
    values: Callable[..., dict[str, Any]], tasks: Sequence[str]
) -> None:
    compare(values, 2, {"cp": context("all_gather")}, *((task, task in ("log_probs", "classes")) for task in tasks))


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_rows_equal_those_of_one_process_with_every_method(values: Callable[..., dict[str, Any]], packed: bool) -> None:
    layouts = {method: context(method) for method in ("ring", "ulysses")}
    compare(values, 2, layouts, *((task, packed) for task in TASKS))


@pytest.mark.full
def test_other_axes_beside_cp_leave_the_rows(values: Callable[..., dict[str, Any]]) -> None:
    layouts = {
        "tp": context("ring", "tensor_parallel", tp=2),
        "fsdp": context("all_gather", "fsdp", dp_shard=2),
        "pp": context("all_gather", pp=2) | {"pipeline": "1f1b"},
    }
    compare(values, 4, layouts, ("log_probs", True), ("classes", False), ("token_classes", False))
    stages = {"stages": layouts["pp"]}
    compare(values, 4, stages, ("hidden_states", False))


def test_a_task_that_takes_whole_samples_is_refused(values: Callable[..., dict[str, Any]]) -> None:
    task = {"name": "generations", "max_new_tokens": 2, "head": "lm"}
    with pytest.raises(RankFailedError, match="inference task 'generations' needs full samples, but ranks of cp"):
        World(2, timeout=120.0).run(infer, [values("refused", task, False, **context("all_gather"))])
