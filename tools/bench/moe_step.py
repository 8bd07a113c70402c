"""Tokens per second of a Qwen3-MoE training step against transformers with grouped_mm experts, in one run.

    python tools/bench/moe_step.py --trace moe.json

Both start from the same weights and see the same tokens: bfloat16 parameters and optimizer states, fused AdamW, the
exact loss over the whole vocabulary. Blocks of steps alternate between the two, so that clocks and neighbours disturb
both alike. In one step of d9d, every wait of the host for the device is an error, and a profile of another step shows
where the time goes.
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
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from d9d_weights.graph.graph import map_tensors
from d9d_weights.sharding.model_tensors import model_tensors
from random_tokens import Synthetic
from timing import synchronise, timed
from torch import nn

MODULES = ("d9d_nn.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_moe.plugin", "d9d_qwen3.plugin")
LR, DECAY, BETAS = 1e-4, 0.1, (0.9, 0.95)

#: kind of work -> parts of its kernels' names; the first match counts.
KINDS = {
    "grouped matrix products": ("grouped", "GroupProblemShape", "ptr_array", "prepare_gemm"),
    "attention": ("flash", "fmha", "cudnn_generated", "sdpa"),
    "other matrix products": ("gemm", "nvjet", "cutlass", "splitK"),
    "optimizer": ("FusedAdam", "multi_tensor"),
    "sorting": ("sort", "Sort", "radix"),
}


def job_of(options: argparse.Namespace, directory: str) -> Job:
    """Job of the benchmark."""
    values = {
        "run": {"dir": directory},
        "steps": 10_000,
        "batch": {"size": options.samples},
        "parallel": ["compile"] if options.compile else [],
        "kernels": dict(choice.split("=") for choice in options.kernels),
        "precision": {"parameters": "bfloat16"},
        "model": {
            "name": "qwen3_moe", "vocab_size": options.vocabulary, "hidden_size": options.hidden,
            "num_layers": options.layers, "num_attention_heads": options.heads, "num_key_value_heads": options.groups,
            "head_dim": 128, "num_experts": options.experts, "experts_per_token": options.top,
            "moe_intermediate_size": options.inside, "max_positions": options.sequence,
        },
        "task": "causal_lm",
        "data": {"name": "random_tokens", "vocab_size": options.vocabulary, "sequence_length": options.sequence},
        "optimizer": {"name": "adamw", "lr": LR, "weight_decay": DECAY, "betas": list(BETAS)},
        "trackers": [],
        "export": False,
    }  # fmt: skip
    registry = Registry.of(*map(importlib.import_module, MODULES), Synthetic())
    return Job.from_values(values, registry=registry)


def transformers_step(trainer: Trainer, config: Any, device: torch.device) -> Callable[[], Any]:
    """Training step of transformers' model with d9d's weights."""
    import transformers
    from d9d_qwen3.hugging_face.moe import Qwen3MoeHuggingFace

    layout = Qwen3MoeHuggingFace()
    fused = config.model_copy(update={"expert_files": "fused"})
    theirs = transformers.Qwen3MoeConfig.from_dict(
        layout.config_json(fused, "bfloat16") | {"experts_implementation": "grouped_mm", "attn_implementation": "sdpa"}
    )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(theirs, experts_implementation="grouped_mm")  # type: ignore[no-untyped-call]
    torch.set_default_dtype(previous)
    assert model.config._experts_implementation == "grouped_mm"  # noqa: SLF001 - nothing public tells
    with torch.no_grad():
        model.load_state_dict(map_tensors(layout.exporter(fused), model_tensors(trainer.stage)))
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=device.type == "cuda"
    )

    def step() -> Any:
        (microbatch,) = trainer.prefetcher.next()
        targets = microbatch["targets"]
        loss = model(input_ids=microbatch["tokens"], labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def check_no_waits(run: Callable[[], Any]) -> str:
    """Run a step with an error for each synchronisation of the host with the device."""
    synchronise()
    torch.cuda.set_sync_debug_mode("error")
    run()
    torch.cuda.set_sync_debug_mode("default")
    return "none"


def where_time_goes(run: Callable[[], Any], trace: Path | None) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the kernels that take longest."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        synchronise()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        text = Path(file.name).read_text()
    if trace is not None:
        trace.write_text(text)
    events = [
        event for event in json.loads(text)["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kind = next((k for k, words in KINDS.items() if any(word in event["name"] for word in words)), "elementwise")
        kinds[kind] += event["dur"] / 1e3
        names[event["name"][:110]].append(event["dur"] / 1e3)
    busiest = sorted(names.items(), key=lambda item: -sum(item[1]))[:25]
    span = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    return {
        "ms": {kind: round(total, 1) for kind, total in sorted(kinds.items(), key=lambda item: -item[1])},
        "idle_ms": round(span / 1e3 - sum(kinds.values()), 1),
        "launches": len(events),
        "longest": [(name, len(found), round(sum(found), 2)) for name, found in busiest],
    }


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser()
    for name, value in (
        ("samples", 4), ("sequence", 4096), ("layers", 8), ("hidden", 2048), ("heads", 32), ("groups", 4),
        ("experts", 128), ("top", 8), ("inside", 768), ("vocabulary", 151_936), ("steps", 5), ("rounds", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kernels", nargs="*", default=[], help="op=backend")
    parser.add_argument("--trace", type=Path, help="where the profile of a step of ours goes")
    parser.add_argument("--alone", action="store_true", help="ours only")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        job = job_of(options, directory)
        trainer = job.build(print)
    numbers = iter(range(10_000))

    def ours() -> Any:
        return trainer.step(next(numbers), trainer.prefetcher.next()).loss

    runs: dict[str, Callable[[], Any]] = {"ours": ours}
    if not options.alone:
        runs["transformers"] = transformers_step(trainer, job.model, device)
    gc.collect()
    gc.freeze()  # like the trainer
    start = time.perf_counter()
    losses = {name: [run().item() for _ in range(3)] for name, run in runs.items()}
    print(f"first steps took {time.perf_counter() - start:.0f} s, losses {losses}", flush=True)
    waits = check_no_waits(ours) if device.type == "cuda" else "no GPU here"
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks = {}
    for index in range(options.rounds):
        # Alternate the order: the first contender after a pause runs at other GPU clocks.
        for name, run in list(runs.items())[:: 1 if index % 2 == 0 else -1]:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times[name].append(timed(run, options.steps))
            peaks[name] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    medians = {name: statistics.median(found) for name, found in times.items()}
    tokens = options.samples * options.sequence
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in trainer.stage.parameters()),
        "losses": losses,
        "waits": waits,
        "ms": {name: round(found * 1e3, 1) for name, found in medians.items()},
        "tokens_per_second": {name: round(tokens / found) for name, found in medians.items()},
        "peak_gib_with_both": peaks,
    }
    if not options.alone:
        result["ratio"] = round(medians["transformers"] / medians["ours"], 3)
        result["ratios"] = [round(b / a, 3) for a, b in zip(times["ours"], times["transformers"], strict=True)]
    print(json.dumps(result), flush=True)
    for name, run in runs.items() if device.type == "cuda" else ():
        where = where_time_goes(run, options.trace if name == "ours" else None)
        longest = where.pop("longest")
        print(name, json.dumps(where))
        for kernel, launches, ms in longest:
            print(f"  {ms:8.2f} ms  {launches:4d} x  {kernel}", flush=True)


if __name__ == "__main__":
    main()
