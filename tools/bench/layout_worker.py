"""One process of the comparison of layouts: builds its rows one after the other and measures each."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from d9d_engine.api import Job
from d9d_engine.planner.device import Device
from d9d_engine.testing import load_kernels_eagerly
from here import topology_of
from memory_predictions import predicted
from records import GIB, hardware
from rows import Row, registry
from timing import synchronise, timed
from torch import distributed as dist
from traces import Kernel, covered, merged, recorded

#: Steps before those that are measured; one, if steps take longer than so many seconds.
WARMUP, SLOW = 6, 1.5
#: Seconds that are measured, of steps that take less, and the most steps.
WINDOW, STEPS = 4.0, 10


def measured(row: Row, job: Job, device: torch.device, launched: float) -> dict[str, Any]:
    """Measurement of a row: seconds of a step, tokens of a GPU's second, peak, communication, of the slowest rank."""
    topology = topology_of(job, device) if row.ranks > 1 else None
    trainer = job.build(lambda _: None, topology)
    taken = iter(range(10_000))

    def step() -> torch.Tensor:
        loss: torch.Tensor = trainer.step(next(taken), trainer.prefetcher.next()).loss
        return loss

    try:
        gc.collect()
        gc.freeze()  # as the trainer does
        losses = [step().item()]
        _forget_peak(device)
        seconds = _most(timed(lambda: losses.append(step().item()), 1))
        found: dict[str, Any] = {}
        if seconds < SLOW:
            losses += [step().item() for _ in range(WARMUP - len(losses))]
            found["sixth_step"] = time.time() - launched
            _forget_peak(device)
            seconds = _most(timed(step, 1))
        if seconds < WINDOW:
            seconds = _most(timed(step, min(STEPS, max(1, int(WINDOW / seconds)))))
        found |= {"seconds": seconds, "tokens_per_second": row.tokens / seconds / row.ranks, "losses": losses}
        if device.type == "cuda":
            found["peak_gib"] = _most(torch.cuda.max_memory_allocated() / GIB)
        if device.type == "cuda" and row.ranks > 1:
            found |= _communication(step, device)
        return found
    finally:
        gc.unfreeze()
        trainer.prefetcher.close()


def _communication(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of a step in which communication runs, and in which nothing else does, and its longest kernels."""

    def run() -> None:
        synchronise()
        step()
        synchronise()

    kernels = recorded(run, device)
    compute = [kernel for kernel in kernels if kernel.kind == "compute"]
    moved = [kernel for kernel in kernels if kernel.kind != "compute"]
    spans = [Kernel("", begin, end, 0, "") for begin, end in merged(moved)]
    total = sum(span.end - span.begin for span in spans)
    named: dict[str, float] = {}
    for kernel in moved:
        named[kernel.name] = named.get(kernel.name, 0.0) + (kernel.end - kernel.begin) / 1e3
    return {
        "communication_ms": total / 1e3,
        "exposed_ms": (total - covered(spans, compute)) / 1e3,
        "compute_ms": sum(end - begin for begin, end in merged(compute)) / 1e3,
        "longest": dict(sorted(named.items(), key=lambda item: -item[1])[:4]),  # type: ignore[dict-item]
    }


def _most(value: float) -> float:
    """Largest value of all ranks."""
    if not dist.is_initialized():
        return value
    one = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(one, dist.ReduceOp.MAX)
    return one.item()


def _answer(row: Row, device: torch.device, rates: Device, launched: float) -> dict[str, Any]:
    places = [tempfile.gettempdir() + f"/d9d-layouts-{os.getpid()}"]
    if dist.is_initialized():
        dist.broadcast_object_list(places, 0)  # one directory for all ranks; nothing is saved in it
    job = Job.from_values(row.values(places[0], device.type), registry=registry())
    found: dict[str, Any] = {"name": row.name, "predicted": predicted(job, rates), "hardware": hardware()}
    start = time.perf_counter()
    try:
        found |= measured(row, job, device, launched)
    except torch.OutOfMemoryError:
        found["failed"] = "out of memory"
    except Exception as error:  # of one row; the others are still worth their time
        traceback.print_exc()
        found["failed"] = f"{type(error).__name__}: {error}"[:300]
    return {**found, "whole_seconds": time.perf_counter() - start}


def main(asked: str, answered: str, gpu: str, launched: str) -> None:
    """Append the answer of each row to a file, on the first rank."""
    cuda = torch.cuda.is_available()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        load_kernels_eagerly("cuda")
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rates = Device.named(gpu)
    if cuda:  # ops keep more where there is more memory
        rates = rates.model_copy(update={"memory_gib": torch.cuda.mem_get_info()[1] / GIB})
    for values in json.loads(Path(asked).read_text(encoding="utf-8")):
        answer = _answer(Row.from_json(values), device, rates, float(launched))
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(_said(answer), flush=True)
            with Path(answered).open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer) + "\n")
        if "failed" in answer and world > 1:
            os._exit(1)  # other ranks may wait for what this one does not send
        _forget(device)
    if dist.is_initialized():
        dist.destroy_process_group()


def _said(answer: dict[str, Any]) -> str:
    if "failed" in answer:
        return f"{answer['name']}: {answer['failed']}"
    ahead = answer["predicted"]
    return (
        f"{answer['name']}: {answer['tokens_per_second']:,.0f} tokens/s of a GPU, {1e3 * answer['seconds']:.1f} ms "
        f"(predicted {1e3 * ahead.get('seconds', 0):.0f}), {answer.get('peak_gib', 0):.1f} GiB (predicted "
        f"{ahead.get('allocated_gib', 0):.1f}), communication {answer.get('communication_ms', 0):.1f}, exposed "
        f"{answer.get('exposed_ms', 0):.1f}; row took {answer['whole_seconds']:.0f} s"
    )


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _forget(device: torch.device) -> None:
    """Release the memory of the row before, and what was compiled for its shapes."""
    gc.collect()
    # Else a second shape would be compiled for any shape, which no job of its own does.
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
