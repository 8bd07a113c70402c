"""Models of transformers train the same in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_testing.layouts import Harness, assert_passed
from d9d_transformers.config import example
from d9d_verify.layouts import Layout

PLUGINS = (
    "d9d_moe.plugin", "d9d_nn.plugin", "d9d_parallel.plugin", "d9d_pipeline.plugin", "d9d_peft.plugin",
    "d9d_transformers.plugin", "d9d_testing.toy.plugin",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
WINDOW = SIZES | {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPLIT = [
    Layout("replicate 2", {"dp_replicate": 2}, ("replicate",)),
    Layout("fsdp 2", {"dp_shard": 2}, ("fsdp",)),
    Layout("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ("hsdp",)),
    Layout("pp 2", {"pp": 2}, (), ("pipeline=1f1b",)),
    Layout("ring 2", {"cp": 2}, ({"name": "context_parallel", "method": "ring"},)),
    Layout("ulysses 2", {"cp": 2}, ({"name": "context_parallel", "method": "ulysses"},)),
    Layout("checkpointing", {}, ("activation_checkpointing",)),
]
TENSOR = [
    Layout("tp 2", {"tp": 2}, ("tensor_parallel",)),
    Layout("tp 2, in turns", {"tp": 2}, ({"name": "tensor_parallel", "asynchronous": True},)),
    Layout("tp 2 x pp 2", {"tp": 2, "pp": 2}, ("tensor_parallel",), ("pipeline=1f1b",)),
    Layout("tp 2 x ring 2", {"tp": 2, "cp": 2}, ("tensor_parallel", {"name": "context_parallel", "method": "ring"})),
]
KINDS = {
    "llama": SIZES, "gemma3_text": WINDOW, "olmo2": SIZES, "phi3": SIZES | {"sliding_window": None},
    "qwen3_moe": SIZES | EXPERTS, "gpt_oss": WINDOW | EXPERTS,
}  # fmt: skip


def values(kind: str, sizes: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "steps": 3,
        "device": "cpu",
        "model": {"name": "transformers", "config": {"model_type": kind, **sizes}},
        "task": "causal_lm",
        "data": {"name": "toy_tokens", "vocab_size": 96, "sequence_length": 16},
        "batch": {"size": 8, "microbatch": 2},
        "optimizer": {"name": "toy_optimizer", "lr": 0.1},
        "trackers": [],
        "export": False,
        **sections,
    }


@pytest.mark.full
def test_experts_train_the_same_on_several_ranks() -> None:
    layouts = [
        Layout("fsdp 2, ep 2", {"dp_shard": 2, "ep": 2}, ("fsdp", "expert_parallel")),
        Layout("replicate 2, ep 2", {"dp_replicate": 2, "ep": 2}, ("replicate", "expert_parallel")),
        Layout("tp 2, fsdp 2, ep 2", {"tp": 2, "dp_shard": 2, "ep": 2}, ("tensor_parallel", "fsdp", "expert_parallel")),
    ]
    assert_passed(Harness(values("qwen3_moe", SIZES | EXPERTS), PLUGINS).compare(layouts))


@pytest.mark.parametrize(
    ("kind", "balancing"),
    [
        pytest.param("qwen3_moe", [{"name": "auxiliary_loss", "coefficient": 0.01}], marks=pytest.mark.full),
        pytest.param("deepseek_v3", [{"name": "bias_update", "rate": 0.01}, "z_loss"], marks=pytest.mark.thorough),
    ],
)
def test_balanced_experts_train_the_same_in_every_layout(kind: str, balancing: list[Any]) -> None:
    job = values(kind, {**example(kind).config, "vocab_size": 96})
    job["model"]["balancing"] = balancing
    experts = Layout("fsdp 2, ep 2", {"dp_shard": 2, "ep": 2}, ("fsdp", "expert_parallel"))
    layouts = [SPLIT[1], SPLIT[3], SPLIT[4], TENSOR[0], TENSOR[3], experts]
    assert_passed(Harness(job, PLUGINS).compare(layouts))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_models_with_other_token_mixers_train_the_same_without_a_split_of_samples(kind: str) -> None:
    layouts = [*(layout for layout in SPLIT if "cp" not in layout.mesh), TENSOR[0], TENSOR[2]]
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size" or kind != "nemotron_h"}
    assert_passed(Harness(values(kind, sizes), PLUGINS).compare(layouts))


@pytest.mark.thorough
def test_sinks_train_the_same_over_context_and_stages() -> None:
    kind = "gpt_oss"
    assert_passed(Harness(values(kind, KINDS[kind]), PLUGINS).compare([SPLIT[3], SPLIT[4], SPLIT[5], TENSOR[0]]))


@pytest.mark.thorough
def test_a_llama_of_transformers_trains_the_same_in_a_layout_of_each_axis() -> None:
    assert_passed(Harness(values("llama", SIZES), PLUGINS).compare([SPLIT[1], SPLIT[3], SPLIT[4], TENSOR[0]]))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("peft", [None, {"name": "lora", "r": 4}])
def test_models_train_the_same_in_every_layout(kind: str, peft: dict[str, Any] | None) -> None:
    job = values(kind, KINDS[kind], **({} if peft is None else {"peft": peft}))
    assert_passed(Harness(job, PLUGINS).compare([*SPLIT, *TENSOR]))
