"""Code of one process per device that measures collectives; see :mod:`d9d_planner.links.measure`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

#: Bytes of the largest tensor; the key says whether there is an accelerator.
_SIZES = {True: 1 << 28, False: 1 << 22}
_REPEATS, _PATIENCE = 7, timedelta(seconds=120)


def main(directory: Path, kind: str, rank: int, ranks: int) -> None:
    """Measure collectives; the first rank writes ``rates.json`` into the directory. Collective over all ranks."""
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    backend = "gloo" if kind == "cpu" else dist.get_default_backend_for_device(device)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    # Ranks meet through a file, so that no other machine can connect.
    meeting = (directory / "meeting").as_uri()
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=_PATIENCE)
    try:
        found = rates(device, ranks)
        if rank == 0:
            (directory / "rates.json").write_text(json.dumps(found), "utf-8")
    finally:
        dist.destroy_process_group()


def rates(device: torch.device, ranks: int) -> dict[str, float]:
    """Bytes per second that a rank sends in an all-gather and an all-reduce, and seconds of the smallest all-reduce."""
    size = _SIZES[device.type != "cpu"] // ranks * ranks
    whole, part, small = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (size, size // ranks, 8))
    gathered = _seconds(device, lambda: dist.all_gather_into_tensor(whole, part))
    reduced = _seconds(device, lambda: dist.all_reduce(whole))
    least = _seconds(device, lambda: dist.all_reduce(small))
    # As in d9d_planner.network: each rank receives the others' data once, for an all-reduce twice.
    sent = size * (ranks - 1) / ranks
    taken = max(gathered + reduced - 2 * least, (gathered + reduced) / 100)
    return {"link": 3 * sent / taken, "link_latency": min(least, 1.0)}


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median seconds of a collective on the slowest rank, after two warm-up runs."""
    taken = []
    for _ in range(_REPEATS + 2):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(taken[2:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
