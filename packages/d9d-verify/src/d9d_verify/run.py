"""Runs of layouts in separate processes, and comparison of their measurements."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from d9d_core.errors import D9dError, JobError, TrainingError
from d9d_core.plugin import StrategySpec
from d9d_core.traits import HasExperts, modules_with
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.job import Job
from d9d_engine.launch.agent import run_module

from d9d_verify.compare import Verdict, compare, compared
from d9d_verify.deviations import Deviation, Limits, distance
from d9d_verify.layouts import (
    REFERENCE_LAYOUT,
    Layout,
    layout_dependence,
    layout_values,
    ops_of,
    scaled_model,
    scaled_values,
)
from d9d_verify.measurement import Measurement, read_all

#: Number of additional variants of the reference that are measured for a model with experts in bfloat16.
_MORE = 2

#: Function that starts processes of :mod:`d9d_verify.worker` in a directory; returns the cause of a failure, or
#: ``None``.
Launch = Callable[[Path, int], str | None]


def launch_processes(directory: Path, ranks: int) -> str | None:
    """Start the processes of a layout; return the cause of a failure, or ``None``."""
    alone = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environ = {name: value for name, value in os.environ.items() if name not in alone}
    with (directory / "output.txt").open("w+", encoding="utf-8", errors="replace") as output:
        cause = run_module("d9d_verify.worker", [str(directory)], ranks, {"OMP_NUM_THREADS": "1", **environ}, output)
        if cause is None:
            return None
        if "was killed by" in cause.text:  # the other ranks failed only because they lost a connection
            return cause.text
        output.seek(0)
        failure = directory / "failure.txt"
        lines = [failure.read_text().strip()] if failure.exists() else output.read().strip().splitlines()
    return lines[-1] if lines else cause.text


def verify(
    job: Job, layouts: Sequence[Layout], steps: int, note: Callable[[str], None], launch: Launch = launch_processes
) -> list[Verdict]:
    """Run layouts, and compare each with one process that uses reference kernels, with the same weights and data.

    Args:
        job: job of the user; it is scaled down, see :func:`d9d_verify.layouts.scaled_values`.
        layouts: layouts to compare.
        steps: number of optimizer steps; half-way, each layout saves and continues from the reference's checkpoint.
        note: called with one line per layout, and a list of the compared values.
        launch: starts the processes of the reference, in the directory ``reference``, and of each layout, in the
            directory of its index.

    Raises:
        JobError: the job cannot run in a layout.
        TrainingError: the reference could not be measured.
    """
    values = scaled_values(job, layouts, steps)
    ops = ops_of(job, values)
    for layout in layouts:
        _check(job, layout_values(values, layout, ops), layout)
    model = scaled_model(job, values)
    for reason in layout_dependence(model):
        note(f"this model computes differently in different layouts by design: {reason}")
    for layout in layouts:
        for reason in _altered(job, layout):
            note(reason)
    with tempfile.TemporaryDirectory(prefix="d9d-verify-") as temporary:
        directory = Path(temporary)
        note(f"reference: one process, {steps} steps, batch {values['batch']['size']}")
        routes = bool(modules_with(model, HasExperts))
        reference, sound = _reference(values, ops, layouts, steps, directory / "reference", launch, routes=routes)
        verdicts = []
        for index, layout in enumerate(layouts):
            note(f"{layout.name}: {layout.ranks} process{'es' if layout.ranks > 1 else ''}")
            mine, here = layout_values(values, layout, ops), directory / str(index)
            measured = _run(mine, layout.ranks, steps, here, launch, directory / "reference")
            if isinstance(measured, str):
                verdicts.append(Verdict.failure(layout.name, f"failed: {measured}"))
                continue
            limits = Limits.of(narrowest_dtype(mine), reference, sound)
            verdict = compare(layout.name, measured, reference, limits)
            if verdict.passed and steps > 1:
                saved, expected = (_checkpoint(at / "checkpoints") for at in (here, directory / "reference"))
                problem = unlike_saved(saved, measured, reference) or unlike_state(saved, expected, limits)
                if problem is not None:
                    verdict = replace(verdict, diverged=(steps // 2 - 1, problem))
            verdicts.append(verdict)
        note(f"compared: {compared(reference)}; {_settings(directory / 'reference', steps)}")
    return verdicts


def _altered(job: Job, layout: Layout) -> Iterator[str]:
    """Lines for the user about strategies that alter the training, with the values that are compared for them."""
    for entry in layout.parallel:
        name = entry["name"] if isinstance(entry, Mapping) else entry
        spec = job.registry.find("strategy", name).spec
        if isinstance(spec, StrategySpec) and spec.alters_training:
            yield (
                f"{layout.name}: with {name}, replicas take their own steps by design; compared are the means of their "
                "gradients, clipped by one norm, and the updates from these, without periodic averaging"
            )


def _checkpoint(directory: Path) -> Checkpoint | None:
    return CheckpointStore(directory).newest(lambda _text: None)


def _tensors(checkpoint: Checkpoint, scope: str) -> dict[str, torch.Tensor]:
    """Full tensors of a checkpoint whose names begin with the prefix ``scope``."""
    table = {name: entry for name, entry in checkpoint.manifest["tensors"].items() if name.startswith(scope)}
    saved = {name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for name, entry in table.items()}
    checkpoint.load_into(saved, scope)
    return saved


def unlike_state(saved: Checkpoint | None, expected: Checkpoint | None, limits: Limits) -> str | None:
    """Compare data position, counters and metrics of a checkpoint with the reference; return a problem or ``None``.

    The position in the data and the counters must be equal; the states of metrics must be equal up to rounding.
    """
    if saved is None or expected is None:
        return "no checkpoint was saved"
    mine, theirs = saved.values(), expected.values()
    for name in ("data", "skipped", "skips"):
        if mine.get(name) != theirs.get(name):
            return f"the checkpoint of step {saved.step} has {name}: {mine.get(name)}, expected {theirs.get(name)}"
    metrics, others = _tensors(saved, "metrics/"), _tensors(expected, "metrics/")
    if metrics.keys() != others.keys():
        return f"the checkpoint of step {saved.step} has the metrics {sorted(metrics)}, expected {sorted(others)}"
    for name, tensor in others.items():
        deviation = Deviation("series", name.split("/")[1], saved.step, distance(metrics[name], tensor))
        if not deviation.size <= (allowed := limits.allowed(deviation)):
            return (
                f"{name} in the checkpoint of step {saved.step} is off by {deviation.size:.1e} (allowed {allowed:.0e})"
            )
    return None


def unlike_saved(checkpoint: Checkpoint | None, measured: Measurement, reference: Measurement) -> str | None:
    """Compare weights and optimizer state in a checkpoint with the trained values; return a problem, or ``None``."""
    if checkpoint is None:
        return "no checkpoint was saved"
    step = checkpoint.step - 1
    saved = _tensors(checkpoint, "model/") | _tensors(checkpoint, "optimizer/")
    trained = reference.under(f"{step}/gradients")
    for name, tensor in saved.items():
        parameter = name.removeprefix("model/")
        # Buffers were replaced by the reference's after each step.
        source = reference if name.startswith("model/") and parameter not in trained else measured
        if not torch.equal(source.tensors[f"{step}/{name}"], tensor):
            return f"{name} in the checkpoint of step {checkpoint.step} differs from the trained value"
    return None


def _settings(directory: Path, steps: int) -> str:
    settings = json.loads((directory / "settings.json").read_text())
    rate, max_norm = settings["rate"], settings["max_norm"]
    clipped = "the job does not clip" if max_norm is None else f"gradients clipped to a norm of {max_norm:.3g}"
    resumed = ", one save and one resume across layouts" if steps > 1 else ""
    return (
        f"{clipped}; learning rate x {rate['factor']:.3g} from step {rate['first'] + 1} of the schedule, so that "
        f"updates show{resumed}"
    )


def narrowest_dtype(values: Mapping[str, Any]) -> torch.dtype:
    """Narrowest dtype in the computation of a resolved job."""
    return torch.bfloat16 if "bfloat16" in json.dumps([values["precision"], values["parallel"]]) else torch.float32


def _check(job: Job, values: Mapping[str, Any], layout: Layout) -> None:
    """Check a layout's job without tensors: an invalid layout is an error, not a deviation.

    Raises:
        JobError: the job cannot run in the layout.
    """
    try:
        Job.from_values(values, registry=job.registry).check(layout.ranks)
    except D9dError as error:
        raise JobError(f"verify: layout {layout.name}: {error}") from error


def _reference(
    values: Mapping[str, Any],
    ops: Sequence[str],
    layouts: Sequence[Layout],
    steps: int,
    directory: Path,
    launch: Launch,
    *,
    routes: bool,
) -> tuple[Measurement, list[Measurement]]:
    """Measure the reference, and variants of it that are also correct but use other rounding, kernels and dtypes.

    If a router chooses experts in a narrow dtype, more variants are measured: a token that goes to another expert
    changes the largest expert load by more than rounding, and this happens in some variants only.

    Raises:
        TrainingError: the reference could not be measured.
    """
    own = layout_values(values, REFERENCE_LAYOUT, ops)
    variants = [own, own | {"kernels": values["kernels"]}]
    narrow = any(narrowest_dtype(layout_values(values, layout, ops)) == torch.bfloat16 for layout in layouts)
    if narrow and narrowest_dtype(own) != torch.bfloat16:  # by a layout's strategy
        variants.append(own | {"precision": {**own["precision"], "autocast": "bfloat16"}})
    if narrow and routes:
        variants += variants[-1:] * _MORE
    directory.mkdir()
    for index, variant in enumerate(variants):
        apart = directory / f"runs-{index}"
        apart.mkdir()
        (directory / f"sound-{index}.json").write_text(json.dumps(_job(variant, apart)))
    found = _run(own, 1, steps, directory, launch, sound=len(variants))
    if isinstance(found, str):
        raise TrainingError(f"verify: the reference could not be measured: {found}")
    return found, [read_all(directory / f"sound-{index}", 1) for index in range(len(variants))]


def _run(
    values: Mapping[str, Any],
    ranks: int,
    steps: int,
    directory: Path,
    launch: Launch,
    reference: Path | None = None,
    sound: int = 0,
) -> Measurement | str:
    """Run the processes of a layout, or of the reference with its variants; return the measurement or the failure."""
    directory.mkdir(exist_ok=True)
    plan = {"steps": steps, "reference": str(reference) if reference else None, "sound": sound}
    (directory / "plan.json").write_text(json.dumps(plan))
    (directory / "job.json").write_text(json.dumps(_job(values, directory)))
    failure = launch(directory, ranks)
    return read_all(directory, ranks) if failure is None else failure


def _job(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Values of a job with its run and checkpoint directories moved into ``directory``."""
    # The jobs share the user's cache of prepared data.
    cache = Path(values["run"]["dir"]) / ".cache"
    if cache.is_dir():
        (directory / "runs").mkdir()
        (directory / "runs" / ".cache").symlink_to(cache.absolute(), target_is_directory=True)
    run = dict(values["run"]) | {"dir": str(directory / "runs")}
    checkpoint = dict(values["checkpoint"]) | {"dir": str(directory / "checkpoints")}
    return dict(values) | {"run": run, "checkpoint": checkpoint}
