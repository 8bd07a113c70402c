"""A run starts from whatever another one left behind: its export, its directory, or one of its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import D9dError, JobError
from d9d_engine.job import Job
from d9d_weights.sharding.model_tensors import model_tensors

pytestmark = pytest.mark.full
LORA = {"name": "lora", "r": 4}


@pytest.fixture(scope="module")
def run(published: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that tuned a published model on conversations."""
    directory = tmp_path_factory.mktemp("first")
    record = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I am Dee."}]}
    (directory / "chats.jsonl").write_text(f"{json.dumps(record)}\n" * 2)
    job = values(directory, published(directory / "base"), peft=LORA, checkpoint={"every": 2})
    Job.from_values(job).build(lambda _: None).train()
    return directory / "runs" / "first"


def values(directory: Path, pretrained: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(directory / "runs"), "name": "first"}, "steps": 4, "device": "cpu", "batch": {"size": 2},
        "model": {"name": "qwen3", "pretrained": str(pretrained)}, "task": "causal_lm", "trackers": [],
        "data": {"name": "chat", "sources": [str(directory / "chats.jsonl")], "sequence_length": 64},
        "optimizer": {"name": "adamw", "lr": 0.01}, **sections,
    }  # fmt: skip


def started(run: Path, pretrained: Path, notes: list[str] | None = None, **sections: Any) -> dict[str, torch.Tensor]:
    """Tensors of a job that starts there."""
    job = values(run.parents[1], pretrained, **sections)
    job["run"] = job["run"] | {"name": "second"}
    return dict(model_tensors(Job.from_values(job).build((notes if notes is not None else []).append).stage))


def test_a_run_and_its_newest_checkpoint_are_the_model_that_it_exported(run: Path) -> None:
    exported = started(run, run / "model")
    for place in (run, run / "checkpoints", max((run / "checkpoints").glob("step-*"))):
        notes: list[str] = []
        found = started(run, place, notes)
        assert found.keys() == exported.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, exported[name]), name
        assert any(note.startswith("pretrained: ") and "step-00000004" in note for note in notes)


def test_an_older_checkpoint_is_another_model(run: Path) -> None:
    older = started(run, run / "checkpoints" / "step-00000002")
    newest = started(run, run)
    assert any(not torch.equal(tensor, newest[name]) for name, tensor in older.items())


def test_what_an_export_keeps_is_kept_once_more(run: Path) -> None:
    job = values(run.parents[1], run / "checkpoints" / "step-00000002", steps=1)
    job["run"] = job["run"] | {"name": "third"}
    Job.from_values(job).build(lambda _: None).train()
    first, third = run / "model", run.parent / "third" / "model"
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (third / file).read_bytes() == (first / file).read_bytes()
    assert json.loads((third / "config.json").read_text()) == json.loads((first / "config.json").read_text())


def test_new_heads_are_named_and_an_adapter_goes_on_top(run: Path) -> None:
    notes: list[str] = []
    heads = {"words": {"kind": "causal_lm"}, "topic": {"kind": "classification", "num_classes": 3}}
    job = values(run.parents[1], run, task={"name": "causal_lm", "head": "words"}, export=False)
    job["model"] |= {"heads": heads, "tie_embeddings": False}
    Job.from_values(job | {"run": {"dir": str(run.parent), "name": "heads"}}).build(notes.append)
    assert any("not in the source, initialised at random: heads.topic" in note for note in notes)
    adapted = started(run, run, peft=LORA | {"init_from": str(run / "adapter")})
    plain = started(run, run)
    assert {name for name in adapted if "lora_" in name} == adapted.keys() - plain.keys()


def test_a_checkpoint_of_another_model_is_refused(run: Path) -> None:
    job = values(run.parents[1], run)
    job["model"]["name"] = "qwen3_moe"
    with pytest.raises(JobError, match="its checkpoint contains a model 'qwen3', not "):
        Job.from_values(job)


def test_a_damaged_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "manifest.json").write_text("{")
    with pytest.raises(D9dError, match=r"manifest\.json cannot be read"):
        started(run, tmp_path)


def test_published_sizes_and_tokenizer_without_the_weights_start_anew(run: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    base = run.parents[1] / "base"
    sizes = shutil.copytree(base, tmp_path / "sizes", ignore=shutil.ignore_patterns("*.safetensors*"))
    drawn, read = started(run, sizes, notes, loading={"weights": False}), started(run, base)
    assert any("all weights are initialised at random" in note for note in notes)
    assert drawn.keys() == read.keys()
    assert not torch.equal(drawn["embedding.weight"], read["embedding.weight"])
