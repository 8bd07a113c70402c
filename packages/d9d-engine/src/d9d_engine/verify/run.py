"""Runs of layouts, each in processes of its own, and comparison of what they computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from d9d_core.errors import D9dError, JobError, TrainingError

from d9d_engine.job import Job
from d9d_engine.verify.compare import Verdict, compare
from d9d_engine.verify.layouts import (
    REFERENCE_LAYOUT,
    Layout,
    layout_dependence,
    layout_values,
    model_ops,
    scaled_model,
    scaled_values,
)
from d9d_engine.verify.measure import Measurement


def verify(job: Job, layouts: Sequence[Layout], steps: int, note: Callable[[str], None]) -> list[Verdict]:
    """Compare layouts with one process that runs reference ops, from the same weights and data.

    Args:
        job: the user's; it is scaled down, see :func:`d9d_engine.verify.layouts.scaled_values`.
        layouts: what to compare.
        steps: optimizer steps.
        note: gets one line per layout.

    Raises:
        JobError: a layout is none that the job could run in.
        TrainingError: the reference could not be computed.
    """
    values = scaled_values(job, layouts, steps)
    stage = scaled_model(job, values)
    ops = model_ops(stage)
    for layout in layouts:
        _check(job, layout_values(values, layout, ops), layout)
    for reason in layout_dependence(stage):
        note(f"this model differs between layouts by its nature: {reason}")
    with tempfile.TemporaryDirectory(prefix="d9d-verify-") as directory:
        note(f"reference: one process, {steps} steps, batch {values['batch']['size']}")
        found = _run(
            layout_values(values, REFERENCE_LAYOUT, ops), REFERENCE_LAYOUT, steps, Path(directory) / "reference"
        )
        if isinstance(found, str):
            raise TrainingError(f"verify: the reference could not be computed: {found}")
        verdicts = []
        for index, layout in enumerate(layouts):
            note(f"{layout.name}: {layout.ranks} process{'es' if layout.ranks > 1 else ''}")
            mine = layout_values(values, layout, ops)
            measured = _run(mine, layout, steps, Path(directory) / str(index))
            if isinstance(measured, str):
                nothing = (float("nan"), "nothing")
                verdicts.append(
                    Verdict(layout.name, *(float("nan"),) * 2, nothing, nothing, (0, f"failed: {measured}"))
                )
            else:
                verdicts.append(compare(layout.name, measured, found, narrowest_dtype(mine)))
    return verdicts


def narrowest_dtype(values: Mapping[str, Any]) -> torch.dtype:
    """Narrowest number format that a resolved job computes in."""
    return torch.bfloat16 if "bfloat16" in json.dumps([values["precision"], values["parallel"]]) else torch.float32


def _check(job: Job, values: Mapping[str, Any], layout: Layout) -> None:
    """Check a layout's job without tensors: a mistake in what was asked for is no deviation.

    Raises:
        JobError: it cannot run.
    """
    try:
        Job.from_values(values, registry=job.registry).check(layout.ranks)
    except D9dError as error:
        raise JobError(f"verify: layout {layout.name}: {error}") from error


def _run(values: Mapping[str, Any], layout: Layout, steps: int, directory: Path) -> Measurement | str:
    """Run a layout; returns what it computed, or why it could not."""
    directory.mkdir()
    (directory / "job.json").write_text(json.dumps(dict(values) | {"run": _run_section(values, directory)}))
    worker = ["-m", "d9d_engine.verify.worker", str(directory), str(steps)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.ranks)]
    command = [sys.executable, *(launcher if layout.ranks > 1 else ()), *worker]
    alone = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environ = {name: value for name, value in os.environ.items() if name not in alone}
    done = subprocess.run(  # noqa: S603 - our own interpreter and module
        command, capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1", **environ}
    )
    if done.returncode == 0:
        return Measurement.read(directory)
    failure = directory / "failure.txt"
    lines = failure.read_text() if failure.exists() else done.stderr
    return lines.strip().splitlines()[-1] if lines.strip() else f"exit status {done.returncode}"


def _run_section(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    # Prepared data is taken from the user's cache; everything written goes to the temporary directory.
    cache = Path(values["run"]["dir"]) / ".cache"
    if cache.is_dir():
        (directory / "runs").mkdir()
        (directory / "runs" / ".cache").symlink_to(cache.absolute(), target_is_directory=True)
    return dict(values["run"]) | {"dir": str(directory / "runs")}
