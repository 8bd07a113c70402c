"""One process of the comparison of layouts: builds its rows one after the other and measures each."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from d9d_engine.job import Job
from d9d_planner.device import Device
from here import topology_of
from memory_predictions import predicted
from rank_steps import WINDOW, answer_all, begin, measured_steps
from records import GIB
from rows import Row, registry
from torch import distributed as dist


def job_of(row: Row, device: torch.device) -> Job:
    """Job of a row; collective over all ranks, which share its directory."""
    places = [tempfile.gettempdir() + f"/d9d-layouts-{os.getpid()}"]
    if dist.is_initialized():
        dist.broadcast_object_list(places, 0)  # one directory for all ranks, in which nothing is saved
    return Job.from_values(row.values(places[0], device.type), registry=registry())


def measured(row: Row, job: Job, device: torch.device, launched: float, window: float = WINDOW) -> dict[str, Any]:
    """Measurement of a row; see :func:`rank_steps.measured_steps`."""
    topology = topology_of(job, device) if row.ranks > 1 else None
    trainer = job.build(lambda _: None, topology)
    taken = iter(range(10_000))

    def step() -> torch.Tensor:
        loss: torch.Tensor = trainer.step(next(taken), trainer.prefetcher.next()).loss
        return loss

    try:
        return measured_steps(step, row.tokens / row.ranks, device, launched, window)
    finally:
        trainer.prefetcher.close()


def main(asked: str, answered: str, launched: str, gpu: str) -> None:
    """Append the answer of each row to a file, on the first rank."""
    questions = json.loads(Path(asked).read_text(encoding="utf-8"))
    rows = [Row.from_json(question["row"]) for question in questions]
    device = begin(pipeline="pp" in dict(rows[0].mesh), only_transfers=rows[0].only_transfers)
    rates = Device.named(gpu)
    if device.type == "cuda":  # ops adapt to the free memory
        rates = rates.model_copy(update={"memory_gib": torch.cuda.mem_get_info()[1] / GIB})

    def measure(question: Mapping[str, Any], answer: dict[str, Any]) -> None:
        row = Row.from_json(question["row"])
        job = job_of(row, device)
        answer["predicted"] = predicted(job, rates)
        answer |= measured(row, job, device, float(launched))

    answer_all(Path(asked), Path(answered), device, measure, _said)


def _said(answer: Mapping[str, Any]) -> str:
    ahead = answer["predicted"]
    return (
        f"{answer['name']}: {answer['tokens_per_second']:,.0f} tokens/s of a GPU, {1e3 * answer['seconds']:.1f} ms "
        f"(predicted {1e3 * ahead.get('seconds', 0):.0f}), {answer.get('peak_gib', 0):.1f} GiB (predicted "
        f"{ahead.get('allocated_gib', 0):.1f}), communication {answer.get('communication_ms', 0):.1f}, exposed "
        f"{answer.get('exposed_ms', 0):.1f}; row took {answer['whole_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
