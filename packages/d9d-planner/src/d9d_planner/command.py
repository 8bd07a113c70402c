"""Command ``d9d plan``: searches for a layout, prints it and writes it into a job file. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml
from d9d_core.cli.garbage import collected_seldom
from d9d_core.cli.options import (
    Files,
    JobPath,
    Memory,
    NoPlugins,
    Overrides,
    Strict,
    bytes_of,
    command_app,
    load_job,
    say,
)
from d9d_core.errors import D9dError, JobError
from d9d_core.job import JobFile
from d9d_core.job_file.reading import write_yaml
from d9d_core.layout.mend import written
from d9d_core.terminal.console import console_for
from rich.text import Text

from d9d_planner.device import Device
from d9d_planner.prediction import Prediction
from d9d_planner.report import advice, largest, memory_line, plan_table, time_line
from d9d_planner.search import Found, refusal, search
from d9d_planner.workload import Workload

app = command_app()
_GIB = 2**30


@app.command()
def plan(
    job: JobPath,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of devices; by default, the mesh's.")
    ] = None,
    memory: Memory = None,
    gpu: Annotated[str, typer.Option(metavar="NAME|FILE", help="h100, h200, b200, or a file of rates.")] = "h200",
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Number of layouts to print.")] = 10,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure this machine's device, use its rates, and write them to a new file."
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="New file for the job with the fastest layout.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Rank meshes, strategies, schedules and microbatches of a job by their predicted time."""
    loaded = load_job(JobFile, job, overrides, plugin, no_plugins, strict_plugins, world_size=gpus)
    for option, file in (("--write", write), ("--calibrate", calibrate)):
        if file is not None and file.exists():
            raise JobError(f"{option}: {file} exists; name another file, or remove it")
    rates = Device.named(gpu)
    if calibrate is not None:
        rates = _calibrated(loaded.device, rates, calibrate)
    device = with_memory(rates, bytes_of(memory))
    workload = Workload(loaded, loaded.registry, loaded.views())
    devices = gpus or loaded.mesh.world_size
    with collected_seldom():  # garbage collections would only visit layouts, which are kept until the end
        found = search(workload, devices, device)
    ranked = accepted(found, loaded, top)
    if not ranked:
        reason = None if found.legal else refusal(workload, devices, device)
        raise JobError(_nothing(found, devices, device, loaded, reason))
    console = console_for()
    console.print(plan_table(found, ranked))
    console.print(f"* no other layout is both faster and smaller; {found.legal:,} layouts were compared")
    console.print(f"1: {time_line(ranked[0])}")
    console.print(f"1: memory {memory_line(ranked[0])}")
    for note in workload.notes:
        say(f"note: {note}")
    if write is not None:
        write.write_text(job_text(loaded, ranked[0]), "utf-8")
        console.print(Text.assemble(("written", "green"), f": {write}, with layout 1"))


def _calibrated(name: str, rates: Device, file: Path) -> Device:
    """Measure this machine's device, and write its rates to a file."""
    from d9d_engine.distributed.devices import choose_device, count_devices  # imports torch; plans themselves do not

    from d9d_planner.calibrate import calibrated

    device, measured = calibrated(choose_device(name), rates, count_devices(name))
    file.write_text(yaml.safe_dump(device.model_dump(mode="json"), sort_keys=False), "utf-8")
    say(f"measured on this machine: {', '.join(measured)}; other rates are from --gpu; written to {file}")
    return device


def with_memory(device: Device, memory: int | None) -> Device:
    """Copy of a device with its memory size replaced by ``memory`` bytes, if given."""
    return device if memory is None else device.model_copy(update={"memory_gib": memory / _GIB})


def accepted(found: Found, job: JobFile, most: int) -> list[Prediction]:
    """Up to ``most`` layouts that pass the job's checks, sorted by predicted time.

    The fastest ``4 * most`` layouts are checked first, then the layouts of the Pareto front of time and memory.
    """
    chosen: list[Prediction] = []
    for prediction in [*found.ranked[: 4 * most], *found.pareto]:
        if prediction in chosen:
            continue
        laid_out = prediction.layout.on(job).use(job.registry)
        try:
            laid_out.check(prediction.layout.mesh.world_size)
        except D9dError:
            continue
        chosen.append(prediction)
        if len(chosen) == most:
            break
    return sorted(chosen, key=lambda prediction: prediction.time.total)


def job_text(job: JobFile, prediction: Prediction) -> str:
    """Text of the job file with the layout replaced; other values are kept, comments are lost."""
    laid_out = prediction.layout.on(job)
    values = {**job.source.document.values}
    for section in ("mesh", "batch", "parallel"):
        values[section] = written(getattr(laid_out, section))
    values["mesh"] = {axis: size for axis, size in prediction.layout.mesh.sizes().items() if size > 1}
    values.pop("pipeline", None)
    if laid_out.pipeline is not None:
        values["pipeline"] = written(laid_out.pipeline)
    predicted = f"{prediction.time.total:.3g} s a step, {prediction.memory.needed / _GIB:.1f} GiB"
    return f"# Layout by d9d plan; predicted: {predicted}.\n" + write_yaml(values, width=120)


def _nothing(found: Found, devices: int, device: Device, job: JobFile, reason: D9dError | None = None) -> str:
    """Message that no layout is valid or fits the memory; ``reason``: error of the simplest layout."""
    if found.smallest is None and reason is not None:
        return f"no layout on {devices} devices is valid: {reason}"
    if found.smallest is None:
        return (
            f"no layout on {devices} devices is valid: batch.size {job.batch.size} and the model's heads, layers and "
            "experts must be divisible by their axes; change the batch or the number of devices"
        )
    need, smallest = found.smallest.memory.needed / _GIB, found.smallest.layout
    return (
        f"no layout on {devices} devices fits into {device.memory / _GIB:.1f} GiB; the smallest, {smallest}, needs "
        f"{need:.1f} GiB ({largest(found.smallest)}); "
        + advice(found.smallest, "use more devices, or a smaller batch or model")
    )
