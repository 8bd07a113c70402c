"""Jobs with multi-token prediction, from their job file to the exported model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from d9d_core.errors import CheckpointError
from d9d_engine.job import Job
from d9d_testing.logs import read_log
from safetensors.torch import load_file


@pytest.fixture
def job(table: ModuleType, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Job of a small model with two depths, evaluated every two steps."""

    def of(**fields: Any) -> dict[str, Any]:
        values = table.job(tmp_path / "corpus", "float32", model=table.LATENT | {"mtp": {"depths": 2, "weight": 0.4}})
        return values | {
            "steps": 4,
            "batch": {"size": 4, "microbatch": 2},
            "metrics": ["perplexity"],
            "evaluation": {"every": 2, "data": values["data"]},
            "trackers": [{"name": "jsonl", "picture": False}],
            **fields,
        }

    return of


def train(directory: Path, values: Mapping[str, Any], name: str) -> list[str]:
    """Train a job from a file; output of the run."""
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**values, "run": {"name": name, "dir": str(directory / "runs")}}))
    notes: list[str] = []
    Job.load(file).build(notes.append).train()
    return notes


def losses(directory: Path, name: str) -> list[dict[str, Any]]:
    """Values of the losses of each logged step; without speeds."""
    lines = read_log(directory / "runs" / name)
    return [{key: value for key, value in line.items() if "loss" in key or key == "step"} for line in lines]


def test_each_depth_has_its_series_and_evaluation_has_none(job: Callable[..., Any], tmp_path: Path) -> None:
    train(tmp_path, job(logging={"every": 1}), "run")
    lines = losses(tmp_path, "run")
    trained = [line for line in lines if "loss" in line]
    assert len(trained) == 4
    for line in trained:
        terms = {"loss/cross_entropy": 1.0, "loss/mtp_loss_1": 0.2, "loss/mtp_loss_2": 0.2}
        balancing = {"loss/router_balance": 0.01, "loss/router_z": 0.001}
        assert line.keys() == {"step", "loss", *terms, *balancing}
        total = sum(factor * line[term] for term, factor in (terms | balancing).items())
        assert line["loss"] == pytest.approx(total, rel=1e-5)
    assert [set(line) for line in lines if "loss" not in line] == [{"step", "eval/loss"}] * 2


@pytest.mark.thorough
def test_a_resumed_run_continues_exactly_and_may_change_the_weight(job: Callable[..., Any], tmp_path: Path) -> None:
    every = {"logging": {"every": 1}, "checkpoint": {"every": 2}}
    train(tmp_path, job(**every), "whole")
    train(tmp_path, job(**every, steps=2), "parts")
    train(tmp_path, job(**every), "parts")
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")
    model = job()["model"]
    notes = train(tmp_path, job(steps=5, model=model | {"mtp": {"depths": 2, "weight": 0.1}}), "parts")
    assert "changed since step-00000004: model.mtp.weight: 0.4 -> 0.1" in notes
    with pytest.raises(
        CheckpointError, match="model.mtp has depths 1 and first embedding, the saved model has depths 2"
    ):
        train(tmp_path, job(steps=6, model=model | {"mtp": {"depths": 1}}), "parts")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_an_export_keeps_the_layers_and_is_tuned_with_or_without_them(job: Callable[..., Any], tmp_path: Path) -> None:
    train(tmp_path, job(export=True), "base")
    model = tmp_path / "runs" / "base" / "model"
    exported, described = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    assert described["num_nextn_predict_layers"] == 2
    assert {"model.layers.3.eh_proj.weight", "model.layers.4.shared_head.head.weight"} <= exported.keys()
    transformers = pytest.importorskip("transformers")
    read = transformers.AutoModelForCausalLM.from_pretrained(model)  # it ignores the layers
    assert read.get_output_embeddings().weight.equal(exported["lm_head.weight"])
    tuned = {"name": "deepseek_v3", "pretrained": str(model)}
    low_rank = {"name": "lora", "r": 4, "targets": ["all-linear"]}
    train(tmp_path, job(model=tuned, peft=low_rank, export=True, steps=2), "both")
    kept = load_file(tmp_path / "runs" / "both" / "model" / "model.safetensors")
    assert kept.keys() == exported.keys()
    assert not kept["model.layers.4.self_attn.o_proj.weight"].equal(exported["model.layers.4.self_attn.o_proj.weight"])
    notes = train(tmp_path, job(model=tuned | {"mtp": {"depths": 0}}, steps=1), "none")
    assert any("left out, as the model has no such tensors: model.layers.*" in note for note in notes)
    assert "loss/mtp_loss_1" not in losses(tmp_path, "none")[0]
