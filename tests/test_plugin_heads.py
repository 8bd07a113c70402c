"""A head that a plugin declares trains in layouts, is exported, and is read back: the example of d9d-nn's README."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_engine.job import Job
from safetensors.torch import load_file

README = Path(__file__).parents[1] / "packages" / "d9d-nn" / "README.md"


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """Job of a classifier with the head of the README."""
    (source,) = re.findall(r"```python\n(# max_head.py\n.*?)```", README.read_text("utf-8"), re.DOTALL)
    (tmp_path / "max_head.py").write_text(source)
    records = [{"text": "abc " * (1 + n % 5) + str(n), "label": "more" if n % 2 else "less"} for n in range(24)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "plugins": ["./max_head.py"], "run": {"name": "texts", "dir": str(tmp_path / "runs")}, "steps": 3,
        "device": "cpu", "batch": {"size": 4, "microbatch": 4}, "task": "classification", "trackers": [],
        "model": {
            "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_positions": 64,
            "heads": {"topic": {"kind": "max_classes", "num_classes": 2}},
        },
        "data": {"name": "labelled", "sources": [str(tmp_path / "texts.jsonl")], "sequence_length": 32},
        "optimizer": {"name": "adamw", "lr": 0.01},
    }  # fmt: skip


def load(job: dict[str, Any], tmp_path: Path) -> Job:
    (tmp_path / "job.json").write_text(json.dumps(job))
    return Job.load(tmp_path / "job.json")


@pytest.mark.thorough
def test_a_head_of_a_plugin_is_trained_exported_and_read_back(job: dict[str, Any], tmp_path: Path) -> None:
    trainer = load(job, tmp_path).build(lambda _text: None)
    before = trainer.stage.heads["topic"].weight.detach().clone()
    trainer.train()
    trained = trainer.stage.heads["topic"].weight.detach()
    assert not torch.equal(trained, before)
    files = tmp_path / "runs" / "texts" / "model"
    assert torch.equal(load_file(files / "model.safetensors")["heads.topic.weight"], trained)
    again = job | {"model": {"pretrained": str(files)}, "run": {**job["run"], "name": "again"}}
    read = load(again, tmp_path)
    assert type(read.model.heads["topic"]).__name__ == "MaxHeadConfig"
    assert torch.equal(read.build(lambda _text: None).stage.heads["topic"].weight.detach(), trained)
    lm = {"pretrained": str(files), "heads": {"words": {"kind": "causal_lm"}}}  # the plugin's head is left out
    other = {"data": job["data"] | {"name": "text", "field": "text"}}
    load(job | other | {"model": lm, "task": "causal_lm", "plugins": []}, tmp_path).build(lambda _text: None)


def test_an_unknown_kind_lists_the_kinds_of_plugins(job: dict[str, Any], tmp_path: Path) -> None:
    job["model"]["heads"]["topic"]["kind"] = "max_clases"
    with pytest.raises(
        JobError, match=r"model.heads.topic: .*did you mean 'max_classes'\? kinds: causal_lm, .*max_classes"
    ):
        load(job, tmp_path)


def test_a_wrong_field_of_a_plugins_head_is_refused_where_it_stands(job: dict[str, Any], tmp_path: Path) -> None:
    job["model"]["heads"]["topic"]["num_clases"] = 3
    with pytest.raises(JobError, match=r"model.heads.topic.num_clases: .*did you mean 'num_classes'"):
        load(job, tmp_path)
