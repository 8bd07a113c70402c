"""Code of a process that measures the reference or a layout, started by :mod:`d9d_verify.run`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from d9d_core.errors import D9dError
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_engine.process_env import ProcessEnv

from d9d_verify.measure import Rate, Resume, measure, probe
from d9d_verify.measurement import Measurement, read_all


def main(directory: Path) -> None:
    """Run the measurement that ``plan.json`` in ``directory`` describes, as one process of its job."""
    try:
        with Job.load(directory / "job.json").joined(ProcessEnv.from_environment(os.environ)) as topology:
            measure_plan(directory, topology)
    except BaseException as error:
        text = str(error) if isinstance(error, D9dError) else f"{type(error).__name__}: {error} ({_place(error)})"
        with suppress(FileExistsError), (directory / "failure.txt").open("x") as file:
            file.write(text)  # only the first failure is kept: later ones follow from it
        raise


def _place(error: BaseException) -> str:
    """File and line that raised an error; the caller's line if torch raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    torch = f"{os.sep}torch{os.sep}"
    frame = next((frame for frame in reversed(frames) if torch not in frame.filename), frames[-1])
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def measure_plan(directory: Path, topology: Topology) -> None:
    """Run the measurement that ``plan.json`` describes, and write this rank's records. Collective over all ranks."""
    plan = json.loads((directory / "plan.json").read_text())
    if plan["reference"] is None:
        _reference(directory, topology, plan["steps"], plan["sound"])
    else:
        _layout(directory, topology, plan["steps"], Path(plan["reference"]))


def _reference(directory: Path, topology: Topology, steps: int, sound: int) -> None:
    """Measure the reference and its variants, with a learning rate and clipping that have visible effects."""
    job = Job.load(directory / "job.json")
    rate, norm = probe(_clipped(job, None), topology, steps)
    max_norm = None if job.gradient_clipping.max_norm is None or not norm else norm / 2
    (directory / "settings.json").write_text(json.dumps({"rate": asdict(rate), "max_norm": max_norm}))
    resume = Resume(steps // 2) if steps > 1 else None
    record = measure(_clipped(job, max_norm), topology, steps, rate=rate, resume=resume)
    record.write(directory, 0)
    reference = Measurement.of([record])
    for index in range(sound):
        variant = _clipped(Job.load(directory / f"sound-{index}.json"), max_norm)
        (directory / f"sound-{index}").mkdir()
        found = measure(variant, topology, steps, reference, rate, elsewhere=True, seed=index)
        found.write(directory / f"sound-{index}", 0)


def _layout(directory: Path, topology: Topology, steps: int, reference: Path) -> None:
    """Measure a layout, guided by the reference; half-way, it continues from the reference's checkpoint."""
    settings = json.loads((reference / "settings.json").read_text())
    job = _clipped(Job.load(directory / "job.json"), settings["max_norm"])
    resume = Resume(steps // 2, reference / "checkpoints") if steps > 1 else None
    record = measure(job, topology, steps, read_all(reference, 1), Rate(**settings["rate"]), resume)
    record.write(directory, topology.rank)


def _clipped(job: Job, max_norm: float | None) -> Job:
    clipping = job.gradient_clipping.model_copy(update={"max_norm": max_norm})
    return job.model_copy(update={"gradient_clipping": clipping})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
