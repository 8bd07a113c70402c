"""Published weights: into every data-parallel layout, through training, and back out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_nn import plugin as nn_plugin
from d9d_qwen3 import plugin as qwen3_plugin
from d9d_testing.layouts import Harness, assert_passed
from d9d_testing.toy import plugin as toy_plugin
from d9d_verify.layouts import Layout

PLUGINS = ("d9d_nn.plugin", "d9d_parallel.plugin", "d9d_qwen3.plugin", "d9d_testing.toy.plugin")
WORDS = 96


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that transformers wrote, in several files, with the files next to the weights."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4},
        tie_word_embeddings=True,
        attention_bias=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def values(published: Path, **changes: Any) -> dict[str, Any]:
    return {
        "steps": 3,
        "device": "cpu",
        "model": {"name": "qwen3", "pretrained": str(published)},
        "task": "causal_lm",
        "data": {"name": "toy_tokens", "vocab_size": WORDS, "sequence_length": 12},
        "batch": {"size": 8, "microbatch": 2},
        "optimizer": {"name": "toy_optimizer", "lr": 0.1},
        "trackers": [],
        "export": False,
        **changes,
    }


def test_a_job_that_names_no_model_gets_the_one_that_reads_the_weights(published: Path) -> None:
    registry = Registry.of(nn_plugin, qwen3_plugin, toy_plugin)
    job = Job.from_values(values(published, model={"pretrained": str(published)}), registry=registry)
    assert job.model == Job.from_values(values(published), registry=registry).model
    assert job.resolved()["model"]["name"] == "qwen3"


@pytest.mark.full
def test_every_layout_starts_from_the_same_weights(published: Path) -> None:
    once = ("loading.read=once",)
    layouts = [
        Layout("fsdp 2", {"dp_shard": 2}, ("fsdp",)),
        Layout("replicate 2, read once", {"dp_replicate": 2}, ("replicate",), once),
        Layout("hsdp 2 x 2, read once", {"dp_replicate": 2, "dp_shard": 2}, ("hsdp",), once),
    ]
    assert_passed(Harness(values(published), PLUGINS).compare(layouts))


@pytest.mark.thorough
def test_a_first_loss_is_that_of_transformers_and_the_export_loads_there(published: Path, tmp_path: Path) -> None:
    import transformers

    fields = values(published, steps=1, export=True, run={"dir": str(tmp_path)})
    registry = Registry.of(nn_plugin, qwen3_plugin, toy_plugin)
    job = Job.from_values(fields, registry=registry)
    trainer = job.build(lambda _note: None)
    pack = trainer.prefetcher.next()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(published)
    tokens = torch.cat([microbatch["tokens"] for microbatch in pack])
    targets = torch.cat([microbatch["targets"] for microbatch in pack])
    expected = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    found = trainer.step(0, pack).loss
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)

    trainer.export()
    exported = tmp_path / "run" / "model"
    again, report = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = trainer.stage(tokens=tokens)["logits"]
    torch.testing.assert_close(again(tokens).logits, ours, rtol=1e-5, atol=1e-5)
    before, after = (json.loads((d / "config.json").read_text()) for d in (published, exported))
    assert after["rope_parameters"]["rope_type"] == before["rope_parameters"]["rope_type"] == "yarn"
    assert (exported / "generation_config.json").read_bytes() == (published / "generation_config.json").read_bytes()
