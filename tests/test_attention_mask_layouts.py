"""Attention that is not causal trains alike in every layout: encoders, prefixes, and blocks that a dataset gives."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from d9d_testing.layouts import Harness, assert_passed
from d9d_verify.layouts import Layout
from torch.utils.data import Dataset

COMPILE = {"name": "compile", "backend": "aot_eager"}
REFERENCE = Layout("reference", {}, (), ("batch.microbatch=8",))
#: Windows in one layer of two.
WINDOW = {"sliding_window": 5, "sliding_from_layer": 1}


def context(method: str, ranks: int = 2, *others: Any, **fields: Any) -> Layout:
    strategy = {"name": "context_parallel", "method": method, **fields}
    return Layout(f"cp {ranks}, {method}", {"cp": ranks}, [strategy, *others], ("batch.microbatch=8",))


#: Layouts of two ranks, each method of context parallelism among them.
OFTEN = (context("all_gather"), context("ring"))
LAYOUTS = (
    *OFTEN,
    context("ulysses"),
    context("all_gather", 2, "activation_checkpointing", COMPILE),
    Layout("replicate 2", {"dp_replicate": 2}, ["replicate"], ("batch.microbatch=4",)),
    Layout("fsdp 2, compiled", {"dp_shard": 2}, ["fsdp", COMPILE], ("batch.microbatch=2",)),
    Layout("tp 2", {"tp": 2}, ["tensor_parallel", "activation_checkpointing"], ("batch.microbatch=8",)),
    Layout("pp 2", {"pp": 2}, [], ("pipeline.name=1f1b", "batch.microbatch=4")),
)
FOUR = (
    context("hybrid", 4, head_ranks=2),
    Layout("cp 2, tp 2", {"cp": 2, "tp": 2}, [*OFTEN[1].parallel, "tensor_parallel"], ("batch.microbatch=8",)),
)


def job(table: ModuleType, tmp_path: Path, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    values = table.job(tmp_path / "corpus", "float32", model=table.DENSE | model)
    return {**values, "batch": {"size": 8, "microbatch": 8}, **sections}


def encoder(table: ModuleType, tmp_path: Path) -> dict[str, Any]:
    """Job of a tagger with bidirectional attention, on samples of several lengths."""
    drawn, file = Random(0), tmp_path / "words.jsonl"
    rows = []
    for _ in range(24):
        words = ["".join(drawn.choices("abcdef", k=drawn.randint(1, 3))) for _ in range(drawn.randint(1, 6))]
        rows.append({"tokens": words, "labels": [str("a" in word) for word in words]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    heads = {"tags": {"kind": "token_classification", "num_classes": 2}}
    data = {"name": "labelled", "per": "word", "sources": [str(file)], "sequence_length": 24}
    model = {"attention_mask": "bidirectional", "heads": heads, **WINDOW}
    return job(table, tmp_path, model, data=data, task="token_classification")


#: Values of the padding of :class:`Items`.
PADDING = {"tokens": 0, "targets": -100, "positions": 0, "documents": 9}


@pytest.fixture(autouse=True)
def _ranks_import_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


class Items(Dataset[dict[str, list[int]]]):
    """Samples of several documents, each a question without targets and an answer.

    Args:
        blocks: whether each item gives blocks: its images, which are drawn places of the questions.
    """

    def __init__(self, blocks: bool = False) -> None:
        drawn = Random(1)
        self.rows = [self.row(drawn, blocks) for _ in range(48)]

    def row(self, drawn: Random, blocks: bool) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {name: [] for name in (*PADDING, "attention_blocks")}
        for document in range(drawn.randint(1, 3)):
            question, answer = drawn.randint(1, 6), drawn.randint(1, 2)
            length = question + answer
            found["tokens"] += [drawn.randrange(257) for _ in range(length)]
            found["targets"] += [-100] * (question - 1) + [drawn.randrange(257) for _ in range(answer)] + [-100]
            found["positions"] += range(length)
            found["documents"] += [document] * length
            found["attention_blocks"] += [drawn.choice((-1, 0, 1)) for _ in range(question)] + [-1] * answer
        return found if blocks else {name: found[name] for name in PADDING}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


def answers(table: ModuleType, tmp_path: Path, blocks: bool = False) -> dict[str, Any]:
    """Job of a language model with prefix attention, or with attention within images."""
    padding = PADDING | ({"attention_blocks": -1} if blocks else {})
    data = {
        "name": "dataset", "build": f"{__name__}:Items", "arguments": {"blocks": blocks}, "padding": padding,
        "pad_multiple": 24,
    }  # fmt: skip
    return job(table, tmp_path, {"attention_mask": "blocks" if blocks else "prefix", **WINDOW}, data=data)


def images(table: ModuleType, tmp_path: Path) -> dict[str, Any]:
    return answers(table, tmp_path, blocks=True)


@pytest.mark.thorough
@pytest.mark.parametrize("made", [encoder, answers, images])
def test_later_keys_are_seen_by_the_ranks_of_a_sample_as_by_one_process(
    table: ModuleType, tmp_path: Path, made: Any
) -> None:
    assert_passed(Harness(made(table, tmp_path), table.PLUGINS, 2).compare(OFTEN, reference=REFERENCE))


@pytest.mark.full
@pytest.mark.parametrize("made", [encoder, answers, images])
def test_attention_that_is_not_causal_trains_alike_in_every_layout(
    table: ModuleType, tmp_path: Path, made: Any
) -> None:
    assert_passed(Harness(made(table, tmp_path), table.PLUGINS, 3).compare([*LAYOUTS, *FOUR], reference=REFERENCE))
