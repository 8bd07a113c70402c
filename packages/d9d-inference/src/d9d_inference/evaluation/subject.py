"""Subjects of ``d9d evaluate``: a job file, a run's directory, or a pretrained model. Imports no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d9d_core.config import ModelConfig
from d9d_core.errors import JobError
from d9d_core.job_file.document import Document
from d9d_core.job_file.pretrained import read_config_json
from d9d_core.job_file.saved_job import SavedJob
from d9d_core.plugin import ModelSpec, StrategySpec
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_core.untrusted import Place
from d9d_engine.job import Job
from d9d_engine.run.directory import JOB, PLUGINS

from d9d_inference.evaluation.content import dataset_of

#: Batch sizes for a pretrained model without a job.
_BATCH = {"size": 64, "microbatch": 8}
#: Largest number of positions of a sample, unless the model supports fewer.
_LENGTH = 2048


@dataclass(frozen=True)
class Subject:
    """Model to evaluate, with the data to evaluate it on.

    Attributes:
        name: name of the model, as given by the user.
        job: job with all datasets in ``evaluation.sets``.
        run: whether the weights are read from a checkpoint of the job's run; else from ``model.pretrained``.
        checkpoint: ``newest``, ``best`` or a step.
        note: text for the user about a changed layout; ``None`` if the layout is unchanged.
    """

    name: str
    job: Job
    run: bool
    checkpoint: str = "newest"
    note: str | None = None


@dataclass(frozen=True)
class Request:
    """Options of ``d9d evaluate``, without the model to evaluate.

    Attributes:
        files: files of samples, used instead of the job's datasets.
        like: job, or job file, with the task, data and layout for a pretrained model.
        checkpoint: ``newest``, ``best`` or a step.
        overrides: ``section.field=value``.
        policy: restrictions on plugins.
        world_size: number of processes; if a run has a mesh of another size, its layout is replaced. ``None`` keeps
            the run's layout.
    """

    files: Sequence[Path] = ()
    like: Path | Job | None = None
    checkpoint: str | None = None
    overrides: Sequence[str] = ()
    policy: PluginPolicy | None = None
    world_size: int | None = None

    def load(self, path: Path) -> Job:
        """Load a job file with the options."""
        return Job.load(path, overrides=self.overrides, policy=self.policy, world_size=self.world_size)

    def load_saved(self, path: Path) -> Job:
        """Load the job file of a run without executing code that it names; see :mod:`d9d_core.job_file.saved_job`."""
        step = [] if self.checkpoint is None else ["--checkpoint", self.checkpoint]
        trust = shlex.join(["d9d", "evaluate", str(path), *step])
        policy = self.policy or PluginPolicy()
        named = (policy | PluginPolicy.from_environment(os.environ)).files
        return Job.load_saved(
            SavedJob(path, trust, named), overrides=self.overrides, policy=policy, world_size=self.world_size
        )


def find_subject(target: str | Job, request: Request, registry: Registry) -> Subject:
    """Find the model and data to evaluate.

    Args:
        target: job, job file, directory of a run or of one of its checkpoints, or a model in Hugging Face layout.
        request: further options.
        registry: registry of the plugins, for a model without a job.

    Raises:
        D9dError: the target is none of these, has no weights, or does not fit an option.
    """
    chosen = request.checkpoint
    if chosen is not None and chosen not in ("newest", "best") and not chosen.isdecimal():
        raise JobError(f"--checkpoint: '{chosen[:40]}' names no checkpoint; use newest, best, or the number of a step")
    if isinstance(target, Job):
        return _of_job(target.run.name, target, request)
    place = Place.of(target)
    path = place.path
    if place.kind == "file" and path.suffix != ".safetensors":
        if path.name == JOB and (path.parent / PLUGINS).is_file():  # every run's directory has both files
            return _of_run(target, path.parent, request, request.load)
        return _of_job(target, request.load(path), request)
    if place.kind == "checkpoint":
        if chosen is not None:
            raise JobError(f"--checkpoint has no effect, as {target} is a checkpoint itself; remove the option")
        step = path.name.rpartition("-")[2]
        if place.run is None or not step.isdecimal():
            raise JobError(f"{target} is not in a run, so its data is unknown; give the run: d9d evaluate RUN")
        request = replace(request, checkpoint=str(int(step)))
        return _of_run(target, place.run, request, request.load_saved)
    if place.kind == "run":
        return _of_run(target, path, request, request.load_saved)
    if place.kind in ("address", "file", "model"):
        if chosen is not None:
            raise JobError(
                f"--checkpoint has no effect, as {target} is a pretrained model without checkpoints; remove the option"
            )
        return _of_model(target, request, registry)
    what = "it does not exist" if not path.exists() else "it has neither job.yaml nor config.json"
    raise JobError(f"{target}: {what}; give a job file, the directory of a run, or a model in Hugging Face layout")


def same_data(other: Subject, first: Subject) -> Subject:
    """Give ``other``, the second model of a comparison, the data and layout of ``first``.

    Raises:
        JobError: the job of ``other`` does not fit this data or layout.
    """
    values, own = first.job.resolved(), other.job.resolved()
    kept = {name: own[name] for name in ("model", "peft", "run", "loading", "precision", "checkpoint", "seed")}
    job = Job.from_values({**values, **kept}, registry=first.job.registry)
    return replace(other, job=job.use(first.job.registry, first.job.source))


def _of_run(target: str, run: Path, request: Request, load: Callable[[Path], Job]) -> Subject:
    record = run / JOB
    if not record.is_file():
        raise JobError(f"{target}: {run} has no job.yaml, so it is no run; give the job file or the run's directory")
    job, note = _for_processes(target, load(record), request)
    # The run's directory may have been moved.
    moved = job.run.model_copy(update={"dir": run.resolve().parent, "name": run.resolve().name})
    job = job.model_copy(update={"run": moved}).use(job.registry, job.source)
    return replace(_of_job(target, job, request), run=True, note=note)


def _for_processes(target: str, job: Job, request: Request) -> tuple[Job, str | None]:
    """Fit a run's job to the number of processes; return the job and a note if its layout changed."""
    trained, here = job.mesh.world_size, request.world_size
    given = any(one.startswith(("mesh", "parallel", "pipeline")) for one in request.overrides)
    if here is None or here == trained or given:
        return job, None
    values = {**job.resolved(), "pipeline": None}
    del values["mesh"]
    # Keep strategies that use no mesh axis, such as compilation.
    specs = [job.registry.find("strategy", one.selector).spec for one in job.parallel]
    kept = [isinstance(spec, StrategySpec) and not spec.axes for spec in specs]
    values["parallel"] = [value for value, stays in zip(values["parallel"], kept, strict=True) if stays]
    settled = Job.from_values(values, registry=job.registry, world_size=here)
    counts = f"{_processes(trained)}; it is evaluated in {_processes(here)}"
    return settled, f"{target} was trained in {counts}"


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def _of_job(target: str, job: Job, request: Request) -> Subject:
    if isinstance(request.like, Path):
        raise JobError(f"--like has no effect, as {target} is a job, or a run with its own job; remove the option")
    location = job.checkpoint.location(job.run.directory)
    trained = isinstance(location, str) or any(Path(location).glob("step-*"))
    pretrained = isinstance(job.model, ModelConfig) and job.model.pretrained is not None and job.loading.weights
    if not trained and (request.checkpoint is not None or not pretrained):
        raise JobError(
            f"{target}: the run has no checkpoint in {location}"
            + ("" if request.checkpoint else ", and the job has no 'model.pretrained'")
            + "; train first (d9d train), or evaluate the directory of a model"
        )
    return Subject(target, _evaluated(job.resolved(), job, request.files), trained, request.checkpoint or "newest")


def _of_model(target: str, request: Request, registry: Registry) -> Subject:
    if request.like is not None:
        like = request.like
        if isinstance(like, Path):
            like = request.load(like)
        model = {"pretrained": target} if _is_found(like) else {"name": like.model.selector, "pretrained": target}
        values = {**like.resolved(), "model": model, "peft": None}
        values["loading"] = {**values["loading"], "weights": True}
        return Subject(target, _evaluated(values, like, request.files), run=False)
    if not request.files:
        raise JobError(f"{target}: no data is given; add --data FILE.jsonl, or --like JOB for the data of a job")
    fields = read_config_json(target)
    inside = fields.get("text_config")  # the language model's section, if the model also reads images
    most = {**(inside if isinstance(inside, dict) else {}), **fields}.get("max_position_embeddings")
    length = min(most, _LENGTH) if isinstance(most, int) and most > 0 else _LENGTH
    datasets = _datasets(request.files, {"sequence_length": length // 8 * 8 or length})
    values = {
        "model": {"pretrained": target},
        "task": "causal_lm",
        "data": next(iter(datasets.values())),
        "optimizer": _any_optimizer(registry),
        "steps": 1,
        "batch": _BATCH,
        "trackers": [],
        "export": False,
        "evaluation": _section(datasets, []),
    }
    values = dict(Document(values).override(request.overrides).values)
    return Subject(target, Job.from_values(values, registry=registry, world_size=request.world_size), run=False)


def _datasets(files: Sequence[Path], like: Mapping[str, Any]) -> dict[str, Any]:
    """Datasets of files, by the names of the files without suffix."""
    datasets: dict[str, Any] = {}
    for path in files:
        if path.stem in datasets:
            raise JobError(f"--data: two files are named '{path.stem}' without their suffixes; rename one")
        datasets[path.stem] = dataset_of(path, like)
    return datasets


def _evaluated(values: Mapping[str, Any], job: Job, files: Sequence[Path]) -> Job:
    """Job with the datasets to evaluate in ``evaluation.sets``, without trackers, subscribers and export."""
    section = job.evaluation
    if files:
        datasets = _datasets(files, values["data"])
    elif section is None:
        datasets = {"data": values["data"]}
    else:
        datasets = values["evaluation"]["sets"] or {"evaluation": values["evaluation"]["data"]}
    metrics = list(values["evaluation"]["metrics"]) if section is not None else []
    metrics += [metric for metric in values["metrics"] if metric not in metrics]
    return Job.from_values(
        {
            **values,
            "evaluation": _section(datasets, metrics),
            "metrics": [],
            "trackers": [],
            "subscribers": [],
            "export": False,
        },
        registry=job.registry,
    ).use(job.registry, job.source)


def _section(datasets: Mapping[str, Any], metrics: Sequence[Any]) -> dict[str, Any]:
    return {"every": 1, "packs": "all", "sets": dict(datasets), "metrics": list(metrics)}


def _is_found(job: Job) -> bool:
    """Whether the job's model lists Hugging Face model types, by which a ``config.json`` selects a model."""
    spec = job.registry.find("model", job.model.selector).spec
    return isinstance(spec, ModelSpec) and bool(spec.model_types)


def _any_optimizer(registry: Registry) -> str:
    """Name of an optimizer: a job must name one, although an evaluation does not build it."""
    names = sorted({entry.spec.key for entry in registry.entries("optimizer")})
    if not names:
        raise JobError("no optimizer is installed, but every job must name one; install d9d-optim")
    return "adamw" if "adamw" in names else names[0]
