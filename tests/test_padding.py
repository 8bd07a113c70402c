"""Padding counts nowhere: documents of many lengths train alike, however they are cut into microbatches and spread."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_testing.layouts import Harness, assert_passed, job_of
from d9d_testing.logs import read_log
from d9d_verify.layouts import Layout

_PIPELINE = ("pipeline=1f1b",)
BALANCING = [
    {"name": "auxiliary_loss", "scope": "sequence", "coefficient": 0.05},
    {"name": "z_loss", "coefficient": 0.01},
    {"name": "bias_update", "rate": 0.05},  # large enough that other loads choose other experts
]
BATCH = 12


def layout(name: str, microbatch: int, parallel: tuple[str, ...] = (), *more: str, **mesh: int) -> Layout:
    return Layout(name, mesh, parallel, (f"batch.size={BATCH}", f"batch.microbatch={microbatch}", *more))


REFERENCE = layout("one microbatch", BATCH)
LAYOUTS = [
    layout("six microbatches", 2),
    layout("replicate 2", 3, ("replicate",), dp_replicate=2),
    layout("1f1b, pp 2", 3, (), *_PIPELINE, pp=2),
    layout("fsdp 2, ep 2", 2, ("fsdp", "expert_parallel", "activation_checkpointing"), dp_shard=2, ep=2),
]


def job(table: ModuleType, directory: Path, **model: Any) -> dict[str, Any]:
    """A job over documents of very different lengths, padded to a multiple of eight positions."""
    corpus = directory / "documents.jsonl"
    texts = ["the quick brown fox jumps over the lazy dog, and then it sleeps. "[: 1 + 7 * n % 31] for n in range(36)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    values = table.job(directory / "corpus", "float32", model=table.EXPERTS | {"balancing": BALANCING} | model)
    data = {"name": "documents", "sources": [str(corpus)], "sequence_length": 24, "bucket_window": 36}
    return values | {"data": data, "optimizer": {"name": "sgd", "lr": 0.5}}


@pytest.mark.full
def test_layouts_agree_on_padded_documents_with_balanced_experts(table: ModuleType, tmp_path: Path) -> None:
    assert_passed(Harness(job(table, tmp_path), table.PLUGINS, 4).compare(LAYOUTS, reference=REFERENCE))


@pytest.mark.thorough
def test_dynamic_positions_of_a_document_do_not_depend_on_what_it_is_padded_with(
    table: ModuleType, tmp_path: Path
) -> None:
    model = table.DENSE | {"rope_scaling": {"type": "dynamic", "factor": 4, "original_max_positions": 8}}
    values = job(table, tmp_path) | {"model": model}
    assert_passed(Harness(values, table.PLUGINS, 2).compare(LAYOUTS[:1], reference=REFERENCE))


@pytest.mark.full
@pytest.mark.parametrize("microbatch", [2, BATCH])
def test_tokens_are_those_of_documents_without_padding(table: ModuleType, tmp_path: Path, microbatch: int) -> None:
    values = job(table, tmp_path) | {
        "steps": 9, "batch": {"size": BATCH, "microbatch": microbatch}, "trackers": ["jsonl"],
        "run": {"name": "tokens", "dir": str(tmp_path)}, "logging": {"every": 1}, "metrics": ["router"],
    }  # fmt: skip
    job_of(values, table.PLUGINS).build(lambda _text: None).train()
    lines = read_log(tmp_path / "tokens")
    tokens = [line["tokens"] for line in lines if "tokens" in line]
    lengths = [1 + 7 * n % 31 for n in range(36)]  # a byte each, and the end of text, which predicts nothing
    assert tokens[-1] == 3 * sum(min(length, 24) for length in lengths)
