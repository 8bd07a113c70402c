"""Training steps on all ranks of a benchmark's processes: their time, memory and communication."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from d9d_engine.distributed.devices import load_kernels_eagerly, share_hardware_queues
from here import synchronise
from records import GIB, hardware
from timing import timed
from torch import Tensor
from torch import distributed as dist
from traces import Kernel, covered, merged, recorded

#: Number of warm-up steps, and seconds per step above which one is enough.
WARMUP, SLOW = 6, 1.5
#: Seconds to measure, and largest number of measured steps.
WINDOW, STEPS = 4.0, 10


def begin(*, pipeline: bool = False, only_transfers: bool = False) -> torch.device:
    """Device of this process; joins the process group that torchrun describes, if there are several ranks.

    Args:
        pipeline: load kernels at the start, as jobs with stages do.
        only_transfers: let streams share hardware queues, as jobs of the schedule `1f1b` and nothing else do.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        if pipeline:
            load_kernels_eagerly("cuda")
        if only_transfers:
            share_hardware_queues("cuda")
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return device


def answer_all(
    asked: Path,
    answered: Path,
    device: torch.device,
    measure: Callable[[Mapping[str, Any], dict[str, Any]], None],
    said: Callable[[Mapping[str, Any]], str],
) -> None:
    """Append the answer to each question to a file, on the first rank; after one that failed, end several ranks.

    Args:
        asked: file with the list of questions, in JSON.
        answered: file of answers, one a line.
        device: device of this rank.
        measure: function that writes its results for a question into the answer; an exception becomes ``failed`` in it.
        said: function that returns a line about an answer, to print.
    """
    for question in json.loads(asked.read_text(encoding="utf-8")):
        answer: dict[str, Any] = {"hardware": hardware()}
        start = time.perf_counter()
        try:
            measure(question, answer)
        except torch.OutOfMemoryError:
            answer["failed"] = "out of memory"
        except Exception as error:  # the failure concerns one question; answer the others
            traceback.print_exc()
            answer["failed"] = f"{type(error).__name__}: {error}"[:300]
        answer |= {"name": question["name"], "whole_seconds": time.perf_counter() - start}
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{answer['name']}: {answer['failed']}" if "failed" in answer else said(answer), flush=True)
            with answered.open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer) + "\n")
        if "failed" in answer and dist.is_initialized():
            os._exit(1)  # other ranks may wait for a message of this one
        forget(device)
    if dist.is_initialized():
        dist.destroy_process_group()


def measured_steps(
    step: Callable[[], Tensor], tokens: float, device: torch.device, launched: float, window: float = WINDOW
) -> dict[str, Any]:
    """Measurement of a step on the slowest rank: seconds, tokens per second and GPU, peak memory, communication.

    Args:
        step: function that runs the next step and returns its loss, on the device. Collective over all ranks.
        tokens: number of tokens of a step on one rank.
        device: device of this rank.
        launched: time at which the processes were launched, as from ``time.time()``.
        window: seconds to measure.
    """
    try:
        gc.collect()
        gc.freeze()  # like the trainer
        losses = [step().item()]
        _forget_peak(device)
        seconds = most(timed(lambda: losses.append(step().item()), 1))
        found: dict[str, Any] = {}
        if seconds < SLOW:
            losses += [step().item() for _ in range(WARMUP - len(losses))]
            found["sixth_step"] = time.time() - launched
            _forget_peak(device)
            seconds = most(timed(step, 1))
        if seconds < window:
            seconds = most(timed(step, min(STEPS, max(1, int(window / seconds)))))
        found |= {"seconds": seconds, "tokens_per_second": tokens / seconds, "losses": losses}
        if device.type == "cuda":
            found["peak_gib"] = most(torch.cuda.max_memory_allocated() / GIB)
        if device.type == "cuda" and dist.is_initialized():
            found |= communication(step, device)
        return found
    finally:
        gc.unfreeze()


def communication(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step with communication, and with nothing but communication, and its longest kernels."""

    def run() -> None:
        synchronise()
        step()
        synchronise()

    return communication_of(recorded(run, device))


def communication_of(kernels: list[Kernel]) -> dict[str, Any]:
    """Communication of a step from its kernels, see :func:`communication`."""
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
        "longest": dict(sorted(named.items(), key=lambda item: -item[1])[:4]),
    }


def most(value: float) -> float:
    """Maximum over all ranks; collective."""
    if not dist.is_initialized():
        return value
    one = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(one, dist.ReduceOp.MAX)
    return one.item()


def forget(device: torch.device) -> None:
    """Free the memory and the compiled code of the previous measurement."""
    gc.collect()
    # Otherwise a second shape would be compiled with dynamic shapes, unlike in a separate job.
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
