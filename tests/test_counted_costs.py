"""Every printed memory and FLOP against torch's allocations and torch's own counter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import D9dError
from d9d_engine.job import Job
from d9d_planner.device import Device
from d9d_planner.prediction import predict
from torch.utils.flop_counter import FlopCounterMode

from tests.sound_jobs import SoundJobs

SIZES = {
    "vocab_size": 257, "hidden_size": 32, "num_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_positions": 64,
}  # fmt: skip
DENSE = {"name": "qwen3", **SIZES, "intermediate_size": 48}
EXPERTS = {"name": "qwen3_moe", **SIZES, "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 16}
LATENT = {
    "name": "deepseek_v3",
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_layers", "max_positions")},
    "num_attention_heads": 4, "intermediate_size": 48, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "first_expert_layer": 1, "num_experts": 4, "experts_per_token": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
RECURRENT = {
    "name": "qwen3_next", **SIZES, "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
LENGTH = 32
LORA = {"name": "lora", "r": 4}
CLASSES = {"heads": {"classes": {"kind": "classification", "num_classes": 3}}}
TAGS = {"heads": {"tags": {"kind": "token_classification", "num_classes": 5}}}
ADAMW, SGD = {"name": "adamw", "lr": 1e-3}, {"name": "sgd", "lr": 1e-3, "momentum": 0.9}
BFLOAT16 = {"parameters": "bfloat16"}
JOBS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"model": {**DENSE, "tie_embeddings": True}},
    "biases": {"model": {**DENSE, "attention_bias": True}},
    "experts": {"model": EXPERTS},
    "latents": {"model": LATENT},
    "lora of latents": {"model": LATENT, "peft": LORA},
    "recurrent": {"model": RECURRENT, "kernels": {"attention": "reference", "gated_delta_rule": "reference"}},
    "bfloat16": {"precision": BFLOAT16},
    "bfloat16 added up in float32": {"precision": BFLOAT16, "gradients": {"accumulate": "float32"}},
    "master weights": {"precision": BFLOAT16, "optimizer": {**ADAMW, "master_weights": True}},
    "sgd": {"optimizer": SGD},
    "muon": {"optimizer": {"name": "muon", "lr": 1e-3}},
    "lora": {"peft": LORA},
    "lora of the last layer": {"peft": {**LORA, "targets": ["layers.2.*"]}},
    "lora of the vocabulary": {"peft": {**LORA, "targets": ["q_proj", "embedding", "heads.*"]}},
    "lora of experts": {"model": EXPERTS, "peft": {**LORA, "targets": ["all-linear", "*.experts.*"]}},
    "lora, added up in float32": {"peft": LORA, "precision": BFLOAT16, "gradients": {"accumulate": "float32"}},
    "dora": {"peft": {"name": "dora", "r": 4}},
    "ia3": {"peft": {"name": "ia3"}},
    "two layers": {"peft": {"name": "full_tune", "match": ["layers.1.*", "layers.2.*"]}},
    "classes": {"model": {**DENSE, **CLASSES}, "task": "classification"},
    "tags": {"model": {**DENSE, **TAGS}, "task": "token_classification"},
    "encoder": {"model": {**DENSE, **TAGS, "attention_mask": "bidirectional"}, "task": "token_classification"},
}


def values(folder: Path, name: str) -> dict[str, Any]:
    sections = JOBS[name]
    task = sections.get("task", "causal_lm")
    records: list[dict[str, Any]] = [{"text": "x" * (LENGTH - 1), "label": f"class {n % 3}"} for n in range(16)]
    data: dict[str, Any] = {"name": "text", "sources": [str(folder / "texts.jsonl")], "field": "text"}
    if task == "classification":
        data |= {"name": "labelled", "label": "label"}
    if task == "token_classification":
        words = ["the"] * (LENGTH // 4)
        tags = [f"tag {number % 5}" for number in range(len(words))]
        records = [{"words": words, "tags": tags} for _ in range(16)]
        data |= {"name": "labelled", "per": "word", "field": "words", "label": "tags"}
    (folder / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "run": {"dir": str(folder / "runs"), "name": "counted"}, "steps": 1, "device": "cpu", "model": DENSE,
        "task": task, "optimizer": ADAMW, "batch": {"size": 4, "microbatch": 2}, "trackers": [], "export": False,
        "data": {**data, "tokenizer": "bytes", "sequence_length": LENGTH},
        "kernels": {"attention": "reference"}, **sections,
    }  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS)
def test_a_plan_counts_what_a_step_allocates_and_computes(tmp_path: Path, name: str) -> None:
    job = Job.from_values(values(tmp_path, name))
    plan = job.plan()
    trainer = job.build(lambda _note: None)
    model, gradients = trainer.stage, dict[str, int]()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_noted(gradients, key))
    pack = trainer.prefetcher.next()
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops}) as counter:
        trainer.step(0, pack)
    assert plan.memory.parameters == sum(parameter.nbytes for parameter in model.parameters())
    assert plan.memory.gradients == sum(gradients.values())
    assert plan.memory.optimizer == sum(tensor.nbytes for tensor in trainer.step.optimizer.state().values())
    if name == "muon":  # its products are no part of the model's
        return
    # The reference of attention computes all keys; printed are those that a token sees.
    layers = {"recurrent": 1, "encoder": 0}.get(name, SIZES["num_layers"])
    features = (24 + 12) / 2 if job.model.name == "deepseek_v3" else SIZES["head_dim"]  # mean of keys and values
    hidden_keys = 12 * layers * SIZES["num_attention_heads"] * features * LENGTH / 2
    counted = counter.get_total_flops() / sum(microbatch["tokens"].numel() for microbatch in pack)
    passes = 1.0 if name != "lora of the last layer" else (2 + 4 / 3) / 6  # two layers have no backward
    assert plan.flops_per_token == pytest.approx(counted - hidden_keys * passes, rel=0.03)


def _grouped_flops(left: Any, right: Any, *_args: Any, **_kwargs: Any) -> int:
    rows, inner = left[-2:]
    return int(2 * rows * inner * right[-1])


def _noted(sizes: dict[str, int], key: str) -> Callable[[torch.Tensor], None]:
    def note(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        sizes[key] = parameter.grad.nbytes

    return note


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The ``declarative_base")  # of Aim, which is one of the trackers
@pytest.mark.parametrize("seed", range(3))
def test_predictions_count_the_state_that_plans_of_random_jobs_have(seed: int) -> None:
    """On the first of some ranks, on which shards of odd sizes are largest."""
    draws, compared = SoundJobs(seed), 0
    while compared < 4:
        job = draws.draw()
        # Muon takes the factors of a fine-tuning method for matrices; predictions do not know their shapes.
        if job.peft is not None and job.optimizer.selector == "muon":
            continue
        try:
            found = predict(job, job.registry, job.views(), Device.named("h200"))
            stored, counted = found.ranks[0], job.plan().memory
        except D9dError:
            continue  # nothing describes the costs, or torch refuses what records allow
        if found.workload.strategy(found.layout).offloads:
            continue  # predicted is the device's memory alone
        compared += 1
        assert stored.parameters == pytest.approx(counted.parameters, rel=0.02, abs=64), job
        assert stored.optimizer == pytest.approx(counted.optimizer, rel=0.02, abs=200), job


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["dense", "tied", "lora", "tags"])
def test_the_first_rank_holds_the_largest_of_uneven_shards(tmp_path: Path, ranks: int, name: str) -> None:
    """Of 257 rows over four ranks, the first has 65."""
    fields = {**values(tmp_path, name), "mesh": {"dp_shard": ranks}, "parallel": ["fsdp"]}
    job = Job.from_values({**fields, "batch": {"size": 8, "microbatch": 1}})
    stored, counted = predict(job, job.registry, job.views(), Device.named("h200")).ranks[0], job.plan().memory
    # Predictions know no shapes of a fine-tuning method's factors, of which each rank has a row here.
    uneven = 0.4 if name == "lora" else 0.0
    assert stored.parameters == pytest.approx(counted.parameters, rel=uneven / 4, abs=0)
    assert stored.optimizer == pytest.approx(counted.optimizer, rel=uneven, abs=200)  # parameters have counters, too


@pytest.mark.parametrize("task", ["causal_lm", "dpo"])
def test_a_plan_counts_tensors_in_host_memory_apart_from_the_memory_of_the_device(tmp_path: Path, task: str) -> None:
    fields = {**values(tmp_path, "dense"), "mesh": {"dp_shard": 2}, "batch": {"size": 8, "microbatch": 1}}
    if task == "dpo":
        pairs = {"name": "preference", "sources": ["pairs.jsonl"], "tokenizer": "absent", "sequence_length": LENGTH}
        fields |= {"task": "dpo", "data": pairs}
    plain, offloaded = (
        Job.from_values({**fields, "parallel": [{"name": "fsdp", "offload": offload}]}).plan().memory
        for offload in (False, True)
    )
    assert plain.host == 0
    assert (offloaded.total, offloaded.host) == (0, plain.total)
    assert (plain.frozen > 0) == (task == "dpo")
    parts = [{"name": "fsdp", "match": ["layers.*"], "offload": True}, {"name": "fsdp", "match": ["heads", "norm"]}]
    part = Job.from_values({**fields, "parallel": [*parts, {"name": "fsdp", "match": ["embedding"]}]}).plan().memory
    assert 0 < part.host < plain.total
    assert part.total + part.host == pytest.approx(plain.total, rel=0.01)
