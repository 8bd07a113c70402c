"""Refusals of `build`, and whether `check` gives the same: all that records and configs decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import D9dError, JobError
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob

MODEL = {
    "name": "qwen3", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_positions": 32,
}  # fmt: skip
LABELLED = {"name": "labelled", "labels": ["a", "b"]}
LORA = {"name": "lora", "r": 2}
CASES: dict[str, dict[str, Any]] = {
    "an adapter without a method": {"export": "adapter"},
    "an adapter of a method without files": {"export": "adapter", "peft": {"name": "full_tune", "match": ["norm"]}},
    "targets that are not there": {"peft": {**LORA, "targets": ["nothing"]}},
    "a tied embedding": {"model": {**MODEL, "tie_embeddings": True}, "peft": {**LORA, "targets": ["embedding"]}},
    "an unknown kernel": {"kernels": {"attention": "none"}},
    "a kernel of no op": {"kernels": {"router": "reference"}},
    "a kernel of another device": {"kernels": {"linear_cross_entropy": "cce"}},
    "tensors that the data does not give": {"task": "dpo"},
    "labels of other dims": {
        "model": {**MODEL, "heads": {"t": {"kind": "token_classification", "num_classes": 2}}},
        "task": "token_classification",
        "data": LABELLED,
    },
    "prefixes without targets": {
        "model": {**MODEL, "attention_mask": "prefix", "heads": {"c": {"kind": "classification", "num_classes": 2}}},
        "task": "classification",
        "data": LABELLED,
    },
    "a series that is never logged": {"checkpoint": {"every": 1, "best": {"series": "eval/los"}}},
    "a series that nothing evaluates": {"subscribers": [{"name": "early_stopping", "series": "eval/loss"}]},
    "a warm-up beyond the run": {"lr_schedule": {"name": "cosine", "warmup_steps": 10}},
    "samples beyond the positions": {"data": {"sequence_length": 64}},
    "a metric of another task": {"metrics": ["auroc"]},
    "a model without the head": {"model": {**MODEL, "heads": {"e": {"kind": "embedding"}}}},
    "a teacher that is not there": {"task": {"name": "distillation", "teacher": {"name": "qwen3", "pretrained": "no"}}},
    "a teacher without weights": {"task": {"name": "distillation", "teacher": MODEL}},
    "weights that are not there": {"model": {"name": "qwen3", "pretrained": "no"}},
    "gradients of two owners": {"parallel": ["fsdp", "replicate"]},
    "more microbatches than samples": {"batch": {"size": 2, "microbatch": 3}},
}
#: Refusals that need more than records and configs -> their needs.
NEEDS: dict[str, tuple[dict[str, Any], str]] = {
    "sources": ({"data": {"sources": ["none"]}}, "the files of the data"),
    "sources of an evaluation": ({"evaluation": {"every": 1, "data": {"sources": ["none"]}}}, "the files of the data"),
    "token ids": ({"model": {**MODEL, "vocab_size": 100}}, "the tokenizer of the data"),
}


def refusal(folder: Path, sections: dict[str, Any], *, built: bool) -> str | None:
    """Message with which a job is refused by `check`, or when it is built; ``None`` if it is not."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    data = {"name": "text", "sources": [str(folder / "text.txt")], "tokenizer": "bytes", "sequence_length": 16}
    (folder / "labelled.jsonl").write_text('{"text": "a fox", "label": "a"}\n{"text": "a dog", "label": "b"}\n')
    changed = json.loads(json.dumps(sections))
    if changed.get("data", {}).get("name") == "labelled":
        changed["data"]["sources"] = [str(folder / "labelled.jsonl")]
    if "evaluation" in changed:
        changed["evaluation"]["data"] = {**data, **changed["evaluation"]["data"]}
    values = {
        "run": {"dir": str(folder / "runs"), "name": "refused"}, "steps": 2, "device": "cpu", "model": MODEL,
        "batch": {"size": 2, "microbatch": 2}, "task": "causal_lm", "optimizer": {"name": "adamw", "lr": 0.01},
        "trackers": [], **changed, "data": {**data, **changed.get("data", {})},
    }  # fmt: skip
    try:
        job = Job.from_values(values)
        if built:
            job.build(lambda _note: None)
        else:
            job.plan()
    except D9dError as error:
        return str(error)
    return None


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_check_refuses_with_the_words_of_build(tmp_path: Path, name: str) -> None:
    checked = refusal(tmp_path, CASES[name], built=False)
    assert checked is not None
    assert checked == refusal(tmp_path, CASES[name], built=True)


@pytest.mark.parametrize("name", NEEDS)
def test_refusals_that_check_cannot_know_are_few(tmp_path: Path, name: str) -> None:
    sections, _needed = NEEDS[name]
    assert refusal(tmp_path, sections, built=False) is None
    assert refusal(tmp_path, sections, built=True) is not None


def test_check_refuses_data_that_an_inference_task_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a", "label": "a"}\n')
    values = {
        "run": {"dir": str(tmp_path), "name": "refused"}, "device": "cpu", "model": MODEL, "task": "log_probs",
        "batch": {"size": 8}, "data": {**LABELLED, "sources": [str(tmp_path / "texts.jsonl")], "tokenizer": "bytes",
                                       "sequence_length": 16},
    }  # fmt: skip
    with pytest.raises(JobError, match="data: task 'log_probs' .* reads targets, which dataset 'labelled' .* does not"):
        InferenceJob.from_values(values).check()
