"""Adapters of experts: which terms the ``peft`` library reads, and which are only in the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World
from safetensors.torch import load_file
from torch import Tensor
from torch import distributed as dist

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_pipeline.plugin",
    "d9d_qwen3.plugin", "d9d_moe.plugin", "d9d_peft.plugin",
)  # fmt: skip
# The library asks transformers for a name that has changed by now.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True."),
]
LORA = {"name": "lora", "r": 4, "alpha": 8}
TOKENS = torch.arange(12)[None] * 7


def train(jobs: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Whole runs, one after the other; what their adapters hold at the end."""
    for one in jobs:
        job = job_of(one, PLUGINS)
        job.build(lambda _: None, topology_here(job) if dist.is_initialized() else None).train()
    return [load_file(Path(one["run"]["dir"]) / "tuned" / "adapter" / "adapter_model.safetensors") for one in jobs]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(TOKENS).logits
    return out


def save_experts(directory: Path, **fields: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, initializer_range=0.2, **fields,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with experts and random weights."""
    return save_experts(tmp_path_factory.mktemp("experts"))


def of_experts(experts: Path, directory: Path, *targets: str, **sections: Any) -> dict[str, Any]:
    """Values of a job that tunes matrices of experts by LoRA."""
    directory.mkdir(exist_ok=True)
    (directory / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return {
        "run": {"name": "tuned", "dir": str(directory / "runs")},
        "steps": 3,
        "device": "cpu",
        "batch": {"size": 4, "microbatch": 1},
        "model": {"name": "qwen3_moe", "pretrained": str(experts)},
        "task": "causal_lm",
        "data": {
            "name": "text",
            "sources": [str(directory / "corpus.txt")],
            "tokenizer": "bytes",
            "sequence_length": 24,
        },
        "optimizer": {"name": "adamw", "lr": 0.02},
        "peft": {**LORA, "targets": ["q_proj", *targets], **sections.pop("method", {})},
        "trackers": [],
        **sections,
    }


@pytest.mark.thorough
def test_terms_of_some_experts_matrices_are_in_the_merged_model_and_a_note_says_that_no_adapter_has_them(
    experts: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    trainer = job_of(of_experts(experts, tmp_path, "gate_proj", "down_proj"), PLUGINS).build(notes.append)
    trainer.train()
    assert any(
        "no adapter is going to be written: the peft library joins the experts' gate_proj, up" in n for n in notes
    )
    run = tmp_path / "runs" / "tuned"
    assert not (run / "adapter").exists()
    stage = trainer.stage.eval()
    with torch.no_grad():
        ours = stage(tokens=TOKENS, positions=torch.arange(TOKENS.shape[1])[None])["logits"]
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(run / "model"))
    torch.testing.assert_close(ours, merged, atol=1e-5, rtol=1e-4)
    plain = logits(transformers.AutoModelForCausalLM.from_pretrained(experts))
    assert (merged - plain).abs().max() > 0.01


# The library looks for its patterns among modules only, and uses them for parameters.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match any targeted module")
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # of layers that are not adapted
@pytest.mark.parametrize("targets", [["q_proj", "*.experts.*"], ["q_proj", "layers.1.ffn.experts.*"], ["*.experts.*"]])
@pytest.mark.full
def test_terms_of_experts_are_read_by_the_library_and_start_a_run(
    experts: Path, tmp_path: Path, targets: list[str]
) -> None:
    method = {"targets": targets}
    job_of(of_experts(experts, tmp_path, method=method), PLUGINS).build(lambda _: None).train()
    run = tmp_path / "runs" / "tuned"
    written = load_file(run / "adapter" / "adapter_model.safetensors")
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(run / "model"))
    library = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(experts), run / "adapter"
    )
    torch.testing.assert_close(logits(library), merged, atol=1e-5, rtol=1e-5)
    plain = logits(transformers.AutoModelForCausalLM.from_pretrained(experts))
    assert (merged - plain).abs().max() > 0.01
    started = of_experts(
        experts, tmp_path, method={**method, "init_from": str(run / "adapter")},
        run={"name": "again", "dir": str(tmp_path / "runs")},
    )  # fmt: skip
    stage = job_of(started, PLUGINS).build(lambda _: None).stage
    bank = stage.get_parameter("layers.1.ffn.experts.terms.up_proj.lora_B")
    assert bank.abs().max() > 0
    for number, matrix in enumerate(bank):
        name = f"base_model.model.model.layers.1.mlp.experts.{number}.up_proj.lora_B.weight"
        assert torch.equal(matrix.T, written[name])


def test_layers_that_are_called_as_experts_are_refused_because_the_library_loses_their_terms(tmp_path: Path) -> None:
    mixed = save_experts(tmp_path / "mixed", mlp_only_layers=[0])
    job = of_experts(mixed, tmp_path, "gate_proj", method={"targets": "all-linear"}, export="adapter")
    with pytest.raises(
        CheckpointError, match="'model.layers.0.mlp.gate_proj' for a matrix of experts, because of its name"
    ):
        job_of(job, PLUGINS).build(lambda _: None)


@pytest.mark.full
def test_experts_spread_over_ranks_write_the_same_adapter(experts: Path, tmp_path: Path) -> None:
    layouts = ({}, {"mesh": {"dp_shard": 2, "ep": 2}, "parallel": ["fsdp", "expert_parallel"]})
    jobs = []
    for number, layout in enumerate(layouts):
        (tmp_path / str(number)).mkdir()
        jobs.append(of_experts(experts, tmp_path / str(number), "*.experts.*", export="adapter", **layout))
    ((alone,),) = World(1).run(train, jobs[:1])
    (spread,) = World(2).run(train, jobs[1:])[0]
    assert spread.keys() == alone.keys()
    for name, tensor in spread.items():
        torch.testing.assert_close(tensor, alone[name], atol=1e-4, rtol=1e-3)
