"""Layouts to verify, and scaling of the job to the memory of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from d9d_core.components.instantiate import instantiate
from d9d_core.config import ModelConfig, PartConfig, PluginConfig, Resizable
from d9d_core.data import DataContext, DataStream
from d9d_core.errors import BuildError, D9dError, DataError, JobError
from d9d_core.grid import AXES
from d9d_core.job_file.reading import read_yaml
from d9d_core.job_file.resolve import Selection, select
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec
from d9d_core.program.placement import checked_programs
from d9d_core.registry.capabilities import Chosen
from d9d_core.registry.policy import FOUNDATION
from d9d_core.registry.registry import REFERENCE
from d9d_core.schedule import Schedule, count_stages
from d9d_core.strategy import matched_modules
from d9d_core.task import Task
from d9d_core.traits import LayoutDependent, modules_with
from d9d_core.types import State
from d9d_engine.compose.assemble import check_divisibility
from d9d_engine.compose.joined_stages import joined_stages
from d9d_engine.job import Job
from torch import nn


@dataclass(frozen=True)
class Layout:
    """Layout to verify: sizes of the mesh, strategies, schedule and overrides of a job.

    Attributes:
        name: name of the layout in messages.
        mesh: axis -> size; missing axes have size 1.
        parallel: strategies, as in a job file.
        overrides: further fields of the job, in the form of ``--set``.
        pipeline: schedule, as in a job file; ``None`` keeps the job's.
    """

    name: str
    mesh: Mapping[str, int]
    parallel: Sequence[Any]
    overrides: tuple[str, ...] = ()
    pipeline: Mapping[str, Any] | None = None

    @property
    def ranks(self) -> int:
        """Number of processes of the layout."""
        return math.prod(size for axis, size in self.mesh.items() if axis in AXES)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks along the data-parallel axes, which see different samples."""
        return self.mesh.get("dp_replicate", 1) * self.mesh.get("dp_shard", 1)


#: Layout of the reference: one process, no strategy, reference ops.
REFERENCE_LAYOUT = Layout("reference", {}, ())


def own_layout(job: Job, max_ranks: int) -> Layout:
    """Layout of the job itself, with every axis reduced to at most two ranks.

    Raises:
        JobError: the reduced layout needs more processes than are allowed.
    """
    mesh = {axis: min(size, 2) for axis, size in job.mesh.sizes().items() if size > 1}
    layout = Layout("job", mesh, [entry.model_dump(mode="json") for entry in job.parallel])
    if layout.ranks > max_ranks:
        raise JobError(
            f"verify: {job.mesh} needs at least {layout.ranks} processes, more than the {max_ranks} that are allowed; "
            "raise --max-ranks or give layouts with --layout"
        )
    shown = " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one process"
    names = ", ".join(entry["name"] for entry in layout.parallel)
    return Layout(f"{shown} {names}".strip(), mesh, layout.parallel)


def parse_layout(text: str, job: Job) -> Layout:
    """Parse a layout: axes, a colon, and names of strategies and of a schedule, with fields in parentheses.

    Examples are ``dp_shard=2:hsdp,compile``, ``pp=2:zero_bubble_v`` and ``cp=2:context_parallel(method=ulysses)``.
    Strategies and schedules that the job has keep the job's settings, except for the given fields.

    Raises:
        JobError: the text is malformed.
    """
    axes, _, names = text.partition(":")
    mesh = {}
    for part in _split(axes):
        axis, equals, size = part.partition("=")
        if axis not in job.mesh.sizes() or not equals or not size.isdecimal() or int(size) < 1:
            raise JobError(f"--layout {text}: write axis=size,...:strategy,..., for example dp_shard=2:fsdp")
        mesh[axis] = int(size)
    known = {entry.spec.key for entry in job.registry.entries("schedule")}
    own = [*job.parallel, *([] if job.pipeline is None else [job.pipeline])]
    settings = {entry.selector: entry.model_dump(mode="json") for entry in own}
    parallel: list[Any] = []
    schedules: list[dict[str, Any]] = []
    for component in _split(names):
        name, fields = _component(component, text)
        chosen = settings.get(name, {"name": name}) | fields
        (schedules if name in known else parallel).append(chosen)
    if len(schedules) > 1 or (schedules and mesh.get("pp", 1) == 1):
        raise JobError(f"--layout {text}: name at most one schedule, and only with pp=2 or more")
    return Layout(text, mesh, parallel, pipeline=schedules[0] if schedules else None)


def _split(text: str) -> list[str]:
    """Split a text at commas outside of brackets, and strip spaces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _component(text: str, layout: str) -> tuple[str, dict[str, Any]]:
    """Name and fields of ``name(field=value,...)``; the values are YAML, as after ``--set``."""
    name, bracket, rest = text.partition("(")
    assignments = [part.partition("=") for part in _split(rest.removesuffix(")"))]
    if (bracket and not rest.endswith(")")) or not all(field and equals for field, equals, _ in assignments):
        raise JobError(f"--layout {layout}: write fields as name(field=value,...), not {text}")
    return name.strip(), {
        field.strip(): read_yaml(value, f"--layout {layout}: {field}")[0] for field, _, value in assignments
    }


def scaled_values(job: Job, layouts: Sequence[Layout], steps: int) -> dict[str, Any]:
    """Values of the job, scaled down: tiny sizes, a small batch, a short evaluation, no trackers.

    All layouts get the same batch and microbatches, enough for each pipeline. Layers are divided evenly over stages,
    because the job's own division over stages fits only the original number of layers.

    Args:
        job: job of the user.
        layouts: layouts to run; sizes of the model are kept as large as their meshes need.
        steps: number of optimizer steps.
    """
    values = job.resolved()
    selection = select(job, job.registry)
    microbatch = min(job.microbatch_size, 2)
    ranks = math.lcm(*(layout.data_parallel_size for layout in layouts))
    count, stages = _stages(job, layouts)

    # Microbatches of two samples show whether one sample affects another; one sample, if the dataset is too small.
    if ranks * microbatch * count > job.batch.size and not _has_data(job, selection, ranks * microbatch * count):
        microbatch = 1
    batch = ranks * microbatch * count
    values |= {
        "model": _tiny(job, selection, layouts, stages).model_dump(mode="json"),
        **_length(job, steps, batch),  # the job's own number, as a learning-rate schedule may need it
        "batch": {"size": batch, "microbatch": microbatch},
        "checkpoint": {"trainable_only": job.checkpoint.trainable_only},
        "trackers": [],
        "subscribers": [],
        "export": False,
        "loading": {"weights": False},  # weights do not fit the tiny model; the tokenizer is still used
        "plugins": _plugins(job),
    }
    if values["pipeline"] is not None:
        values["pipeline"].pop("layers", None)
    if values["evaluation"] is not None:
        packs = values["evaluation"]["packs"]
        values["evaluation"]["packs"] = 2 if packs == "all" else min(packs, 2)
    return values


def _has_data(job: Job, selection: Selection, batch: int) -> bool:
    """Whether the datasets of training and evaluation have enough samples for a batch of this size."""
    datasets = [(selection.dataset, job.data), *selection.evaluation]
    try:
        for chosen, config in datasets:
            _open(job, chosen, config, batch, 1)
    except DataError:
        return False
    return True


def _length(job: Job, steps: int, batch: int) -> dict[str, Any]:
    if job.steps is not None:
        return {"steps": max(steps, job.steps)}
    assert job.epochs is not None
    # as many steps as the job has, with another batch size
    return {"epochs": job.epochs * batch / job.batch.size}


def _stages(job: Job, layouts: Sequence[Layout]) -> tuple[int, list[int]]:
    """Number of microbatches that the schedule of every layout supports, and number of stages in each layout."""
    count = min(max(job.microbatches, 2), 3)
    schedules = [_schedule(job, layout) for layout in layouts]
    widest = max(layout.mesh.get("pp", 1) for layout in layouts)
    # A schedule that supports some number of microbatches supports more; the widest layout needs the most.
    problem: BuildError | None = None
    for more in range(count, 4 * widest + count + 1):
        try:
            return more, [
                count_stages(checked_programs(schedule, layout.mesh["pp"], more)) if schedule else 1
                for layout, schedule in zip(layouts, schedules, strict=True)
            ]
        except BuildError as error:
            problem = error
    assert problem is not None
    raise problem


def _schedule(job: Job, layout: Layout) -> Schedule | None:
    """Schedule of a layout; ``None`` without a pipeline, and for the default schedule, which has one stage per rank."""
    if layout.mesh.get("pp", 1) == 1:
        return None
    if layout.pipeline is not None:
        job = Job.from_values(job.resolved() | {"pipeline": dict(layout.pipeline)}, registry=job.registry)
    selection = select(job, job.registry)
    if selection.schedule is None or job.pipeline is None:
        return None
    schedule: Schedule = instantiate(selection.schedule, job.pipeline)
    return schedule


def _plugins(job: Job) -> dict[str, Any]:
    """Section ``plugins`` that loads the same plugins as this process, including plugins from command-line flags."""
    loaded = job.registry.plugins
    files = sorted({str(Path(origin.distribution).absolute()) for origin in loaded if origin.digest})
    return {"allow": sorted({o.distribution for o in loaded if not o.digest} - FOUNDATION), "files": files}


def layout_values(values: Mapping[str, Any], layout: Layout, ops: Iterable[str]) -> dict[str, Any]:
    """Values of the scaled job in one layout.

    Args:
        values: values from :func:`scaled_values`.
        layout: layout of the job.
        ops: names of all ops of model and optimizer; the reference layout uses reference kernels for them.
    """
    mine = dict(values) | {"mesh": dict(layout.mesh), "parallel": list(layout.parallel)}
    if layout.mesh.get("pp", 1) == 1:
        mine["pipeline"] = None
    elif layout.pipeline is not None:
        mine["pipeline"] = dict(layout.pipeline)

    if layout is REFERENCE_LAYOUT:
        mine["kernels"] = dict.fromkeys(ops, REFERENCE)
    return mine


def scaled_model(job: Job, values: Mapping[str, Any]) -> nn.Module:
    """Build the job's model with the scaled-down sizes of ``values``, on the meta device."""
    selection = select(job, job.registry)
    with torch.device("meta"):
        stage: nn.Module = instantiate(selection.model, type(job.model).model_validate(values["model"]), Stage())
    return stage


def ops_of(job: Job, values: Mapping[str, Any]) -> list[str]:
    """Names of the ops that the scaled job calls in one process: ops of its model, fine-tuning method and optimizer.

    The job is planned, because injected modules and the dtype of parameters change the ops.
    """
    alone = layout_values(values, REFERENCE_LAYOUT, ())
    plan = Job.from_values(alone, registry=job.registry).plan()
    return sorted({choice.op for choice in plan.kernels})


def layout_dependence(stage: nn.Module) -> list[str]:
    """Reasons, without duplicates, why a model computes differently in different layouts by design."""
    modules = modules_with(stage, LayoutDependent).values()
    return list(dict.fromkeys(reason for module in modules for reason in module.layout_dependence()))


def _tiny(job: Job, selection: Selection, layouts: Sequence[Layout], stages: Sequence[int]) -> PluginConfig:
    """Config of the user's model with sizes from its record's tiny config, as far as data, meshes and stages allow."""
    spec = selection.model.spec
    assert isinstance(spec, ModelSpec)
    mine, tiny = _sizes(job.model), {} if spec.tiny is None else _sizes(spec.tiny.load()())
    facts = _facts(job, selection)
    # Keep sizes that the data also states, even if the task does not compare them, and the vocabulary in any case: data
    # that does not state it, such as a user's dataset, may have any of its tokens.
    own = [name for name in mine if name not in facts and name != "vocab_size"]
    smaller = [name for name in own if name in tiny and tiny[name] < mine[name]]
    task: Task = instantiate(selection.task, job.task)
    patterns = [pattern for config in job.parallel if isinstance(config, PartConfig) for pattern in config.match]
    for rules in job.kernels.values():
        patterns += [] if isinstance(rules, str) else [pattern for rule in rules for pattern in rule.match]

    def resized(names: Sequence[str]) -> PluginConfig:
        sizes = {name: tiny[name] for name in names}
        if isinstance(job.model, Resizable):
            return job.model.resized(sizes)
        return type(job.model).model_validate(job.model.model_dump() | sizes)

    def problems(names: Sequence[str]) -> int:
        found = 0
        for layout, count in zip(layouts, stages, strict=True):
            try:
                config = resized(names)
                task.check(config, facts)
                with torch.device("meta"):
                    parts = [instantiate(selection.model, config, Stage(index, count)) for index in range(count)]
                model = joined_stages(parts)
                found += sum(not matched_modules(model, [pattern]) for pattern in patterns)
                check_divisibility(model, dict.fromkeys(job.mesh.sizes(), 1) | dict(layout.mesh))
            except (D9dError, ValueError) as error:
                found += len(str(error).splitlines())
        return found

    # Restore the user's sizes, one field at a time, until data and meshes accept the config, and patterns of the names
    # of modules match, which may name a layer that the tiny model does not have.
    while smaller and problems(smaller):
        smaller.remove(min(smaller, key=lambda field: problems([other for other in smaller if other != field])))
    return resized(smaller)


def _sizes(config: PluginConfig) -> Mapping[str, int]:
    if isinstance(config, Resizable):
        return config.sizes()
    return {name: value for name, value in config.model_dump().items() if type(value) is int}


def _facts(job: Job, selection: Selection) -> State:
    return _open(job, selection.dataset, job.data, job.batch.size, job.microbatch_size).facts


def _open(job: Job, chosen: Chosen, config: PluginConfig, batch: int, microbatch: int) -> DataStream:
    context = DataContext(
        seed=job.seed,
        batch_size=batch,
        microbatch_size=microbatch,
        cache_dir=job.run.cache,
        pretrained=job.model.pretrained if isinstance(job.model, ModelConfig) else None,
    )
    stream: DataStream = instantiate(chosen, config, context)
    return stream
