"""Tokens per second of a LoRA step on the shapes of Qwen3-8B against peft + transformers + Liger, in one run.

    python tools/bench/lora_step.py
    python tools/bench/lora_step.py --samples 4 --checkpointing

Both share the frozen bfloat16 weights, start from the same adapter and see the same tokens: LoRA of rank 16 on all
linear layers, fused AdamW, clipping, the exact loss over the whole vocabulary. Blocks of steps alternate between the
two, so that clocks and neighbours disturb both alike. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from d9d_weights.graph.graph import map_tensors
from d9d_weights.sharding.model_tensors import model_tensors
from random_tokens import Synthetic
from timing import timed
from torch import nn

MODULES = ("d9d_nn.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_peft.plugin", "d9d_qwen3.plugin")
LR, BETAS, RANK, ALPHA = 1e-4, (0.9, 0.95), 16, 32


def job_of(options: argparse.Namespace, directory: str) -> Job:
    """Job of the benchmark."""
    strategies = (["activation_checkpointing"] if options.checkpointing else []) + (
        ["compile"] if options.compile else []
    )
    values = {
        "run": {"dir": directory}, "steps": 10_000, "batch": {"size": options.samples}, "parallel": strategies,
        "precision": {"parameters": "bfloat16"}, "peft": {"name": "lora", "r": RANK, "alpha": ALPHA},
        "model": {
            "name": "qwen3", "vocab_size": options.vocabulary, "hidden_size": options.hidden,
            "intermediate_size": options.inside, "num_layers": options.layers, "num_attention_heads": options.heads,
            "num_key_value_heads": options.groups, "head_dim": 128, "max_positions": options.sequence,
        },
        "task": "causal_lm",
        "data": {"name": "random_tokens", "vocab_size": options.vocabulary, "sequence_length": options.sequence},
        "optimizer": {"name": "adamw", "lr": LR, "weight_decay": 0.0, "betas": list(BETAS)}, "trackers": [],
        "export": False,
    }  # fmt: skip
    registry = Registry.of(*map(importlib.import_module, MODULES), Synthetic())
    return Job.from_values(values, registry=registry)


def their_step(trainer: Trainer, options: argparse.Namespace, device: torch.device) -> Callable[[], Any]:
    """Training step of peft on transformers' model with Liger's kernels, with d9d's weights."""
    import peft
    import transformers
    from d9d_qwen3.config import Qwen3Config
    from d9d_qwen3.hugging_face.dense import Qwen3HuggingFace

    if device.type == "cuda" and options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    layout, config = Qwen3HuggingFace(), trainer.job.model
    assert isinstance(config, Qwen3Config)
    theirs = transformers.Qwen3Config.from_dict(
        layout.config_json(config, "bfloat16") | {"attn_implementation": "sdpa"}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    own = {name: tensor for name, tensor in model_tensors(trainer.stage).items() if "lora_" not in name}
    model.load_state_dict(map_tensors(layout.exporter(config), own), assign=True)
    with device:  # its buffer is in no state dict
        model.model.rotary_emb = type(model.model.rotary_emb)(theirs)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    terms = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, terms, autocast_adapter_dtype=False)
    mine = dict(trainer.stage.named_parameters())
    trained = {}
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                ours = name.removeprefix("base_model.model.model.").replace(".default", "")
                ours = ours.replace("self_attn", "attention").replace("mlp", "ffn")
                parameter.copy_(mine[ours])
                trained[name] = parameter
    assert len(trained) == sum("lora_" in name for name in mine)
    adapted.train()
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=BETAS, weight_decay=0.0, fused=device.type == "cuda")

    def step() -> Any:
        (microbatch,) = trainer.prefetcher.next()
        targets = microbatch["targets"]
        loss = adapted(input_ids=microbatch["tokens"], labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser()
    for name, value in (
        ("samples", 2), ("sequence", 4096), ("layers", 36), ("hidden", 4096), ("heads", 32), ("groups", 8),
        ("inside", 12_288), ("vocabulary", 151_936), ("steps", 4), ("rounds", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        trainer = job_of(options, directory).build(print)
    numbers = iter(range(10_000))

    def ours() -> Any:
        return trainer.step(next(numbers), trainer.prefetcher.next()).loss

    runs: dict[str, Callable[[], Any]] = {"ours": ours, "theirs": their_step(trainer, options, device)}
    gc.collect()
    gc.freeze()  # like the trainer
    start = time.perf_counter()
    losses = {}
    for name, run in runs.items():
        losses[name] = [run().item() for _ in range(3)]
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"first steps took {time.perf_counter() - start:.0f} s, losses {losses}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks = {}
    for index in range(options.rounds):
        # Alternate the order: the first contender after a pause runs at other GPU clocks.
        for name, run in list(runs.items())[:: 1 if index % 2 == 0 else -1]:
            if device.type == "cuda":
                torch.cuda.empty_cache()
                run()  # fills the allocator's cache again
                torch.cuda.reset_peak_memory_stats()
            times[name].append(timed(run, options.steps))
            peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0.0
    medians = {name: statistics.median(found) for name, found in times.items()}
    tokens = options.samples * options.sequence
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {os.cpu_count()} cores",
                "torch": torch.__version__,
                "options": vars(options),
                "losses": losses,
                "ms": {name: round(found * 1e3, 1) for name, found in medians.items()},
                "tokens_per_second": {name: round(tokens / found) for name, found in medians.items()},
                "peak_gib": peaks,
                "ratio": round(medians["theirs"] / medians["ours"], 3),
                "ratios": [round(b / a, 3) for a, b in zip(times["ours"], times["theirs"], strict=True)],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
