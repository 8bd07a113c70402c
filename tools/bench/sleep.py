"""Memory that a trainer frees while it sleeps, and its bandwidth compared with a plain copy to pinned memory.

    python tools/bench/sleep.py --layers 28

Prints JSON: bytes of the training state, the device's memory before and during sleep, and gigabytes per second of
``sleep()``, of ``wake()``, and of a copy of as many bytes between the device and existing pinned memory. The first
sleep has to pin memory; the later ones find it in torch's cache. The model is a dense Qwen3 in bfloat16, the optimizer
AdamW.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from random_tokens import Synthetic
from timing import synchronise

MODULES = ("d9d_nn.plugin", "d9d_optim.plugin", "d9d_qwen3.plugin")
TAGS: tuple[Any, ...] = ("weights", "optimizer")
#: Bytes of a buffer in the plain copy.
BUFFER = 2**28


def job_of(options: argparse.Namespace, directory: str) -> Job:
    """Job of the benchmark."""
    values = {
        "run": {"dir": directory},
        "steps": 10,
        "batch": {"size": 1},
        "precision": {"parameters": "bfloat16"},
        "model": {
            "name": "qwen3", "vocab_size": options.vocabulary, "hidden_size": options.hidden,
            "num_layers": options.layers, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 3 * options.hidden, "max_positions": 512,
        },
        "task": "causal_lm",
        "data": {"name": "random_tokens", "vocab_size": options.vocabulary, "sequence_length": 512},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "trackers": [],
        "export": False,
    }  # fmt: skip
    registry = Registry.of(*map(importlib.import_module, MODULES), Synthetic())
    return Job.from_values(values, registry=registry)


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of one call, including its work on the device."""
    synchronise()
    start = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - start


def plain_copy(size: int) -> dict[str, float]:
    """Gigabytes per second between the device and pinned memory, in each direction."""
    on_device = torch.empty(BUFFER, dtype=torch.uint8, device="cuda").random_()
    on_host = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
    count = max(1, size // BUFFER)

    def there() -> None:
        for _ in range(count):
            on_host.copy_(on_device, non_blocking=True)

    def back() -> None:
        for _ in range(count):
            on_device.copy_(on_host, non_blocking=True)

    found = {}
    for name, run in (("to the host", there), ("to the device", back)):
        run()
        found[name] = count * BUFFER / statistics.median(seconds(run) for _ in range(3)) / 1e9
    return found


def memory() -> dict[str, float]:
    """GiB in tensors, and GiB that the process holds on the device."""
    free, total = torch.cuda.mem_get_info()
    return {"allocated": torch.cuda.memory_allocated() / 2**30, "held": (total - free) / 2**30}


def measure(trainer: Trainer, cycles: int) -> dict[str, Any]:
    """Measure memory and bandwidth of a few sleeps."""
    for _ in trainer.steps(2):
        pass
    gc.collect()
    synchronise()
    state = [*trainer.stage.parameters(), *trainer.stage.buffers(), *trainer.step.optimizer.state().values()]
    size = sum(tensor.untyped_storage().nbytes() for tensor in state)
    found: dict[str, Any] = {"state_gib": size / 2**30, "awake_gib": memory()}
    times: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(cycles):
        times["sleep"].append(seconds(lambda: trainer.sleep(*TAGS)))
        found["asleep_gib"] = memory()
        times["wake"].append(seconds(trainer.wake))
    found["share_of_state_freed"] = (found["awake_gib"]["allocated"] - found["asleep_gib"]["allocated"]) * 2**30 / size
    plain = plain_copy(size)
    found["plain_copy_gb_per_s"] = plain
    for name, way in (("sleep", "to the host"), ("wake", "to the device")):
        first, *later = times[name]
        speed = size / statistics.median(later) / 1e9
        found[name] = {
            "first_gb_per_s": size / first / 1e9,
            "gb_per_s": speed,
            "share_of_plain_copy": speed / plain[way],
        }
    return found


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--cycles", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        job = job_of(options, directory)
        with job.build(lambda _note: None) as trainer:
            found = measure(trainer, options.cycles)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
