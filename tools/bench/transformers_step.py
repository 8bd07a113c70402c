"""Tokens per second of a training step: a model of d9d, and transformers' by d9d-transformers, in one run.

    python tools/bench/transformers_step.py                           Qwen3, of the sizes that options give
    python tools/bench/transformers_step.py --preset gemma/3-1b       a published size of another model
    python tools/bench/transformers_step.py --preset gpt_oss/20b --set num_layers=4   the same with other fields
    python tools/bench/transformers_step.py ... --plain               transformers' own model and loss, without d9d

Both have the same sizes and see the same tokens: bfloat16 parameters and optimizer states, fused AdamW. Blocks of steps
alternate between the two, so that clocks and neighbours disturb both alike.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from random_tokens import Synthetic
from timing import timed
from torch import Tensor

MODULES = (
    "d9d_nn.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_moe.plugin", "d9d_qwen3.plugin",
    "d9d_llama.plugin", "d9d_gemma.plugin", "d9d_deepseek.plugin", "d9d_gpt_oss.plugin", "d9d_qwen3_next.plugin",
    "d9d_transformers.plugin",
)  # fmt: skip
#: Plugins with kernels, which are used where they are installed and run.
KERNELS = ("d9d_triton.plugin", "d9d_cublas.plugin", "d9d_fla.plugin")


def models_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Fields of a model of d9d and of transformers', of equal sizes."""
    if options.preset is not None:
        name, _, preset = options.preset.partition("/")
        changed = {field: json.loads(value) for field, _, value in (text.partition("=") for text in options.set)}
        own = {"name": name, "preset": preset, **changed}
        registry = Registry.of(*map(importlib.import_module, MODULES))
        spec: Any = registry.find("model", name).spec
        config = spec.config.load().model_validate(own)
        options.vocabulary = config.vocab_size
        return {
            name: own,
            "transformers": {
                "name": "transformers",
                "config": spec.hugging_face.load()().config_json(config, "bfloat16"),
            },
        }
    sizes = {"vocab_size": options.vocabulary, "hidden_size": options.hidden, "intermediate_size": options.inside}
    heads = {"num_attention_heads": options.heads, "num_key_value_heads": options.groups, "head_dim": 128}
    shapes = {"num_hidden_layers": options.layers, "max_position_embeddings": options.sequence}
    return {
        "qwen3": {**sizes, **heads, "name": "qwen3", "num_layers": options.layers, "max_positions": options.sequence},
        "transformers": {"name": "transformers", "config": {"model_type": "qwen3", **sizes, **heads, **shapes}},
    }


def trainer_of(model: dict[str, Any], options: argparse.Namespace, directory: str) -> Trainer:
    """Trainer of one model."""
    values = {
        "run": {"dir": directory, "name": model["name"]},
        "steps": 10_000,
        "batch": {"size": options.samples},
        "parallel": ["compile"] if options.compile else [],
        "precision": {"parameters": "bfloat16"},
        "model": model,
        "task": "causal_lm",
        "data": {"name": "random_tokens", "vocab_size": options.vocabulary, "sequence_length": options.sequence},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "trackers": [],
        "export": False,
    }
    plugins = map(importlib.import_module, (*MODULES, *(KERNELS if torch.cuda.is_available() else ())))
    trainer: Trainer = Job.from_values(values, registry=Registry.of(*plugins, Synthetic())).build(print)
    return trainer


def plain_step(config: dict[str, Any], options: argparse.Namespace) -> Callable[[], Tensor]:
    """Training step of transformers' own model, with its own loss and torch's fused AdamW."""
    transformers: Any = importlib.import_module("transformers")
    fields = {name: value for name, value in config.items() if name != "architectures"}
    made = transformers.AutoConfig.for_model(**fields)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.config.use_cache = False
    run = torch.compile(model) if options.compile and not options.eager else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    print("attention", model.config._attn_implementation, "parameters", sum(p.numel() for p in model.parameters()))  # noqa: SLF001

    def step() -> Tensor:
        shape = (options.samples, options.sequence)
        tokens = torch.randint(options.vocabulary, shape, device=device)
        loss: Tensor = run(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser()
    for name, value in (
        ("samples", 4), ("sequence", 4096), ("layers", 28), ("hidden", 1024), ("heads", 16), ("groups", 8),
        ("inside", 3072), ("vocabulary", 151_936), ("steps", 5), ("rounds", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--preset", help="model and published size, instead of sizes")
    parser.add_argument("--set", action="append", default=[], help="field=value of the preset's model; repeatable")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plain", action="store_true", help="transformers without d9d")
    parser.add_argument("--eager", action="store_true", help="with --plain: transformers without torch.compile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        models = models_of(options)
        taken = {name: model for name, model in models.items() if not (options.plain and name == "transformers")}
        trainers = {name: trainer_of(model, options, directory) for name, model in taken.items()}
    numbers = iter(range(100_000))

    def step_of(trainer: Trainer) -> Callable[[], Any]:
        return lambda: trainer.step(next(numbers), trainer.prefetcher.next()).loss

    runs = {name: step_of(trainer) for name, trainer in trainers.items()}
    if options.plain:
        runs["transformers"] = plain_step(models["transformers"]["config"], options)
    gc.collect()
    gc.freeze()  # like the trainer
    losses = {name: [run().item() for _ in range(3)] for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(options.rounds):
        # Alternate the order: the first contender after a pause runs at other GPU clocks.
        for name, run in list(runs.items())[:: 1 if index % 2 == 0 else -1]:
            times[name].append(timed(run, options.steps))
    medians = {name: statistics.median(found) for name, found in times.items()}
    tokens, own = options.samples * options.sequence, next(iter(times))
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "parameters": [sum(p.numel() for p in trainer.stage.parameters()) for trainer in trainers.values()],
        "losses": losses,
        "tokens_per_second": {name: round(tokens / found) for name, found in medians.items()},
        "ratio": round(medians[own] / medians["transformers"], 3),
        "ratios": [round(a / b, 3) for a, b in zip(times[own], times["transformers"], strict=True)],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
