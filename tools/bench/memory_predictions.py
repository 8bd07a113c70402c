"""Predictions of the planner for jobs on one device, against measurements on a GPU: peak memory and time of a step.

    python tools/bench/memory_predictions.py                               # without a GPU, the predictions alone
    python tools/bench/memory_predictions.py --rows 6 --folder runs/predictions
    python tools/bench/memory_predictions.py --only lora --seconds 60

Each row is a job that this process builds, trains for some steps and frees. The peak excludes the first steps, which
compile kernels. The tool prints one line per row as soon as the row is measured, then the largest errors, and
Spearman's rank correlation of predicted and measured times.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import records
import torch
from d9d_core.errors import D9dError
from d9d_engine.job import Job
from d9d_planner.device import Device
from d9d_planner.prediction import predict
from rows import ROWS, TINY, Row, registry
from timing import timed

#: Number of warm-up steps and of measured steps.
WARMUP, STEPS = 2, 2
GIB = records.GIB


def predicted(job: Job, device: Device) -> dict[str, Any]:
    """Prediction for a job: ``seconds`` of a step, GiB of the allocator and of the device, and their parts."""
    try:
        found = predict(job, job.registry, job.views(), device)
        memory, taken = found.memory, found.time
    except D9dError as error:
        return {"not_predicted": str(error)}
    return {
        "seconds": taken.total,
        "allocated_gib": memory.allocated / GIB,
        "needed_gib": memory.needed / GIB,
        "parts_gib": {name: size / GIB for name, size in asdict(memory).items() if size},
        "parts_ms": {name: 1e3 * part for name, part in taken.parts.items() if part},
    }


def measured(job: Job, device: torch.device) -> dict[str, Any]:
    """Measurement of a job: ``seconds`` of a step and, on a GPU, peak GiB in excess of the memory in use before."""
    _forget(device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    start = time.perf_counter()
    try:
        found = _trained(job, device)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:  # the failure concerns one row; measure the others
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["allocated_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        found["outside_gib"] = (total - free - torch.cuda.memory_reserved()) / GIB
        found["before_gib"] = before / GIB
    return {**found, "whole_seconds": time.perf_counter() - start}


def _trained(job: Job, device: torch.device) -> dict[str, Any]:
    """Time per step after the warm-up; peaks are reset after the warm-up."""
    trainer = job.build(lambda _: None)
    try:
        numbers = iter(range(WARMUP + STEPS))
        losses = [trainer.step(next(numbers), trainer.prefetcher.next()).loss.item() for _ in range(WARMUP)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(lambda: trainer.step(next(numbers), trainer.prefetcher.next()), STEPS)
        return {"seconds": seconds, "losses": losses}
    finally:
        trainer.prefetcher.close()


def _forget(device: torch.device) -> None:
    """Free the memory and the compiled code of the previous row."""
    gc.collect()
    # Otherwise a second shape would be compiled with dynamic shapes, unlike in a separate job.
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def line_of(number: int, row: Row, ahead: Mapping[str, Any], found: Mapping[str, Any] | None) -> str:
    """Output line of a row: predicted and measured GiB and milliseconds, with relative errors."""
    parts = [f"{number:2d}  {row.name:46}"]
    if "seconds" in ahead:
        parts.append(f"{ahead['allocated_gib']:6.1f} GiB {1e3 * ahead['seconds']:7.0f} ms")
    else:
        parts.append(f"not predicted: {ahead['not_predicted']}")
    if found is not None and "failed" in found:
        parts.append(f"| {found['failed']}")
    elif found is not None:
        on_gpu = "allocated_gib" in found
        memory = f"{found['allocated_gib']:6.1f} GiB, {found['reserved_gib']:.1f} reserved" if on_gpu else ""
        parts.append(f"| {memory} {1e3 * found['seconds']:7.0f} ms")
        parts += [f"| {name} {error:+.0%}" for name, error in errors_of(ahead, found).items()]
        parts.append(f"| row took {found['whole_seconds']:.0f} s")
    return " ".join(parts)


def errors_of(ahead: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Relative errors of a prediction: ``memory`` and ``time``, if measured."""
    keys = {"memory": "allocated_gib", "time": "seconds"}
    return {name: ahead[key] / found[key] - 1 for name, key in keys.items() if key in ahead and key in found}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Largest errors and rank correlation of rows with ``predicted`` and ``measured``; empty without measurements."""
    both = [(row["predicted"], row["measured"]) for row in rows if row["measured"] and "seconds" in row["measured"]]
    both = [(ahead, found) for ahead, found in both if "seconds" in ahead]
    errors = [errors_of(ahead, found) for ahead, found in both]
    result: dict[str, Any] = {}
    for name in ("memory", "time"):
        known = [one[name] for one in errors if name in one]
        if known:
            result[f"largest_{name}_error"] = max(known, key=abs)
            result[f"median_{name}_error"] = statistics.median(map(abs, known))
    if len(both) > 1:
        result["spearman"] = spearman(*([side["seconds"] for side in sides] for sides in zip(*both, strict=True)))
    return result


def spearman(ones: Sequence[float], others: Sequence[float]) -> float | None:
    """Spearman's rank correlation; ``None`` if one side is constant."""
    sides = [_ranks(ones), _ranks(others)]
    if any(len(set(side)) == 1 for side in sides):
        return None
    return statistics.correlation(*sides)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1 on; equal values share their mean rank."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def main() -> None:
    """Print one line a row, and the summary."""
    options = _options()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    rates, known = Device.named(options.gpu), registry()
    if on_gpu:  # ops adapt to the free memory
        rates = rates.model_copy(update={"memory_gib": torch.cuda.mem_get_info()[1] / GIB})
    chosen = [row for row in (TINY if options.tiny else ROWS) if options.only in row.name][: options.rows]
    start, results = time.perf_counter(), []
    for number, row in enumerate(chosen, 1):
        if options.seconds is not None and time.perf_counter() - start > options.seconds:
            print(f"no time for the last {len(chosen) - number + 1} rows", flush=True)
            break
        with tempfile.TemporaryDirectory() as directory:
            job = Job.from_values(row.values(directory, device.type), registry=known)
            ahead = predicted(job, rates)
            found = measured(job, device) if on_gpu or options.tiny else None
        print(line_of(number, row, ahead, found), flush=True)
        results.append({"row": asdict(row), "name": row.name, "predicted": ahead, "measured": found})
    total = summary(results)
    print(json.dumps(total), flush=True)
    if options.folder is not None:
        result = {
            "table": "memory-predictions", "taken": dt.datetime.now(dt.UTC).date().isoformat(),
            "command": " ".join(["python tools/bench/memory_predictions.py", *sys.argv[1:]]),
            "commit": records.commit(), "hardware": records.hardware(), "gpu": options.gpu,
            "predictions": results, "summary": total,
        }  # fmt: skip
        print(f"written: {records.write(result, options.folder)}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predicted and measured memory and time of jobs on one device.")
    parser.add_argument("--rows", type=int, help="only so many rows, from the first on")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with this in their names")
    parser.add_argument("--seconds", type=float, help="begin no row after so long")
    parser.add_argument("--gpu", default="h200", metavar="NAME|FILE", help="rates of predictions, as of d9d plan")
    parser.add_argument("--folder", type=Path, help="write the result here, as JSON")
    parser.add_argument("--tiny", action="store_true", help="tiny models, trained on a CPU too: tries the tool")
    return parser.parse_args()


if __name__ == "__main__":
    main()
