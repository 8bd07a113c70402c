"""Weights that are exported or evaluated instead of the last step's: the best checkpoint's, and averages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.logs import read_log
from d9d_testing.world import World
from safetensors.torch import load_file
from torch import Tensor
from torch import distributed as dist

PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_pipeline.plugin",
    "d9d_qwen3.plugin", "d9d_peft.plugin",
)  # fmt: skip
EMA = {"name": "ema", "decay": 0.6, "of": {"name": "muon", "lr": 0.02}}
LORA = {"name": "lora", "r": 2, "modules_to_save": ["norm"], "rank_pattern": {"q_proj": 3}}
#: The loss falls, so with `max` the first evaluation is the best one, and a later one would be noticed.
BEST: dict[str, Any] = {"export": "best", "checkpoint": {"every": 2, "keep": 1, "best": {"mode": "max"}}}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]},
    {"mesh": {"pp": 2}, "pipeline": "1f1b"},
    {"mesh": {"tp": 2}, "parallel": ["tensor_parallel"]},
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    return file


def values(directory: Path, corpus: Path, name: str, **sections: Any) -> dict[str, Any]:
    data = {"name": "text", "sources": [str(corpus)], "tokenizer": "bytes", "sequence_length": 16}
    return {
        "run": {"name": name, "dir": str(directory)},
        "steps": 6,
        "device": "cpu",
        "batch": {"size": 4, "microbatch": 1},
        "model": {
            "name": "qwen3", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_positions": 32, "tie_embeddings": False,
        },
        "task": "causal_lm",
        "data": data,
        "optimizer": EMA,
        "evaluation": {"every": 2, "packs": 2, "data": data},
        "checkpoint": {"every": 2},
        "trackers": [{"name": "jsonl", "picture": False}],
        **sections,
    }  # fmt: skip


def train(jobs: list[dict[str, Any]]) -> None:
    for one in jobs:
        job = job_of(one, PLUGINS)
        job.build(lambda _: None, topology_here(job) if dist.is_initialized() else None).train()


def exported(directory: Path, name: str) -> dict[str, Tensor]:
    (file,) = (directory / name).glob("*/*model.safetensors")
    return load_file(file)


def evaluations(directory: Path, name: str) -> list[float]:
    return [line["eval/loss"] for line in read_log(directory / name) if "eval/loss" in line]


def checkpoint(directory: Path, name: str) -> dict[str, Tensor]:
    return load_file(max((directory / name / "checkpoints").iterdir()) / "tensors-00000.safetensors")


@pytest.mark.full
def test_in_every_layout_the_best_averages_and_the_best_adapter_are_exported(tmp_path: Path, corpus: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "averages": BEST,
        "adapter": {**BEST, "peft": LORA, "export": "best", "optimizer": {"name": "ema", "of": "adamw"}},
    }
    alone = [values(tmp_path, corpus, kind, **sections) for kind, sections in kinds.items()]
    spread = [
        values(tmp_path, corpus, f"{kind}-{number}", **sections, **layout)
        for kind, sections in kinds.items()
        for number, layout in enumerate(LAYOUTS)
    ]
    World(1).run(train, alone)
    World(2).run(train, spread)
    for kind in kinds:
        for number in range(len(LAYOUTS)):
            run = f"{kind}-{number}"
            assert evaluations(tmp_path, run) == pytest.approx(evaluations(tmp_path, kind), rel=1e-4)
            for part in ("model", "adapter")[: 1 + (kind == "adapter")]:
                one, other = (load_file(next((tmp_path / name / part).glob("*.safetensors"))) for name in (run, kind))
                assert one.keys() == other.keys()
                for name, tensor in one.items():
                    torch.testing.assert_close(tensor, other[name], atol=1e-3, rtol=1e-3)  # muon rounds to bfloat16
                assert "| Exported checkpoint | step 2 of 6, " in (tmp_path / run / part / "README.md").read_text()


@pytest.mark.thorough
def test_averages_of_a_run_are_as_computed_by_hand_and_are_evaluated_exported_and_resumed(
    tmp_path: Path, corpus: Path
) -> None:
    weights: list[dict[str, Tensor]] = []
    optimizer = {"name": "ema", "decay": 0.6, "warmup": False, "of": {"name": "adamw", "lr": 0.02}}
    with job_of(values(tmp_path, corpus, "whole", optimizer=optimizer), PLUGINS).build(lambda _: None) as trainer:
        state = {name: parameter.detach().clone() for name, parameter in trainer.stage.named_parameters()}
        averages = {name: tensor.clone() for name, tensor in state.items()}
        for _ in trainer.steps():
            state = {name: parameter.detach().clone() for name, parameter in trainer.stage.named_parameters()}
            averages = {name: 0.6 * average + 0.4 * state[name] for name, average in averages.items()}
            weights.append(state)
        with trainer.step.evaluation_weights():
            for name, parameter in trainer.stage.named_parameters():
                torch.testing.assert_close(parameter.detach(), averages[name], atol=1e-6, rtol=1e-5)
    plain = values(tmp_path, corpus, "plain", optimizer=optimizer["of"])
    stored = values(tmp_path, corpus, "stored", optimizer={**optimizer, "apply": False})
    train([plain, stored])
    assert all(
        torch.equal(tensor, exported(tmp_path, "plain")[n]) for n, tensor in exported(tmp_path, "stored").items()
    )
    assert evaluations(tmp_path, "stored") == evaluations(tmp_path, "plain") != evaluations(tmp_path, "whole")
    assert not torch.equal(*(exported(tmp_path, name)["model.norm.weight"] for name in ("plain", "whole")))
    short = values(tmp_path, corpus, "parts", optimizer=optimizer)
    with job_of(short, PLUGINS).build(lambda _: None) as trainer:
        list(trainer.steps(3))
    train([short])
    for one in (checkpoint, exported):
        first, second = one(tmp_path, "whole"), one(tmp_path, "parts")
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    manifest = max((tmp_path / "whole" / "checkpoints").iterdir()) / "manifest.json"
    assert json.loads(manifest.read_text())["average"] == {"slot": "average", "weight": 1.0}
    follower = values(tmp_path, corpus, "follower", model={"pretrained": str(tmp_path / "whole")})
    stage = job_of(follower, PLUGINS).build(lambda _: None).stage
    name = "norm.weight"
    assert torch.equal(stage.get_parameter(name).detach(), exported(tmp_path, "whole")["model.norm.weight"])
