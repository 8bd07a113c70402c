"""Subjects of ``d9d evaluate``: a job file, the directory of a run, or a published model. Imports no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d9d_core.config import ModelConfig
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import D9dError, JobError
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

#: Sizes for a published model without a job.
_BATCH = {"size": 64, "microbatch": 8}
#: Most positions of a sample, unless the model has fewer.
_LENGTH = 2048


@dataclass(frozen=True)
class Subject:
    """Model that is evaluated, with the data that it is evaluated on.

    Attributes:
        name: as the user gave it.
        job: with all datasets in ``evaluation.sets``.
        run: whether weights come from a checkpoint of the job's run; else from ``model.pretrained``.
        checkpoint: ``newest``, ``best`` or a step.
        note: what became of a run's layout, for the user.
    """

    name: str
    job: Job
    run: bool
    checkpoint: str = "newest"
    note: str | None = None


@dataclass(frozen=True)
class Request:
    """Request for the subject of ``d9d evaluate``: the options beside its target.

    Attributes:
        files: of samples, in place of the datasets of a job.
        like: job, or its file, that says task, data and layout for a published model.
        checkpoint: ``newest``, ``best`` or a step.
        overrides: ``section.field=value``.
        policy: restrictions on plugins.
        world_size: number of processes, to which the layout of a run gives way; ``None`` keeps that.
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
        """Load the job file in the directory of a run as data; see :mod:`d9d_core.job_file.saved_job`."""
        step = [] if self.checkpoint is None else ["--checkpoint", self.checkpoint]
        trust = shlex.join(["d9d", "evaluate", str(path), *step])
        policy = self.policy or PluginPolicy()
        named = (policy | PluginPolicy.from_environment(os.environ)).files
        return Job.load_saved(
            SavedJob(path, trust, named), overrides=self.overrides, policy=policy, world_size=self.world_size
        )


def find_subject(target: str | Job, request: Request, registry: Registry) -> Subject:
    """Find the subject of ``d9d evaluate``: a job, a run or a published model.

    Args:
        target: job or its file, directory of a run or of one of its checkpoints, or a model in Hugging Face layout.
        request: the other options.
        registry: meaning of names, for a model without a job.

    Raises:
        D9dError: it is none of these, it has no weights, or an option does not go with it.
    """
    chosen = request.checkpoint
    if chosen is not None and chosen not in ("newest", "best") and not chosen.isdecimal():
        raise JobError(f"--checkpoint: '{chosen[:40]}' is none; use newest, best, or the number of a step")
    if isinstance(target, Job):
        return _of_job(target.run.name, target, request)
    place = Place.of(target)
    path = place.path
    if place.kind == "file" and path.suffix != ".safetensors":
        if path.name == JOB and (path.parent / PLUGINS).is_file():  # which every run has beside its job
            return _of_run(target, path.parent, request, request.load)
        return _of_job(target, request.load(path), request)
    if place.kind == "checkpoint":
        if chosen is not None:
            raise JobError(f"--checkpoint: {target} is a checkpoint already; leave one of them out")
        step = path.name.rpartition("-")[2]
        if place.run is None or not step.isdecimal():
            raise JobError(f"{target} lies in no run, so nothing says on which data; name the run: d9d evaluate RUN")
        request = replace(request, checkpoint=str(int(step)))
        return _of_run(target, place.run, request, request.load_saved)
    if place.kind == "run":
        return _of_run(target, path, request, request.load_saved)
    if place.kind in ("address", "file", "model"):
        if chosen is not None:
            raise JobError(f"--checkpoint: {target} is a published model, which has no checkpoints; leave it out")
        return _of_model(target, request, registry)
    what = "there is nothing there" if not path.exists() else "it has neither job.yaml nor config.json"
    raise JobError(f"{target}: {what}; give a job file, the directory of a run, or a model in Hugging Face layout")


def same_data(other: Subject, first: Subject) -> Subject:
    """Subject on the data of another, in its layout, so that the two can be compared.

    Raises:
        JobError: the job does not go together with it.
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
    # A run may have been moved.
    moved = job.run.model_copy(update={"dir": run.resolve().parent, "name": run.resolve().name})
    job = job.model_copy(update={"run": moved}).use(job.registry, job.source)
    return replace(_of_job(target, job, request), run=True, note=note)


def _for_processes(target: str, job: Job, request: Request) -> tuple[Job, str | None]:
    """Job of a run for the processes there are, whatever the run was trained in; and a note about it."""
    trained, here = job.mesh.world_size, request.world_size
    given = any(one.startswith(("mesh", "parallel", "pipeline")) for one in request.overrides)
    if here is None or here == trained or given:
        return job, None
    values = {**job.resolved(), "pipeline": None}
    del values["mesh"]
    # What uses no axis of the mesh stays, such as compilation.
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
        raise JobError(f"--like: {target} is a job itself, or has one; leave it out")
    location = job.checkpoint.location(job.run.directory)
    trained = isinstance(location, str) or any(Path(location).glob("step-*"))
    pretrained = isinstance(job.model, ModelConfig) and job.model.pretrained is not None and job.loading.weights
    if not trained and (request.checkpoint is not None or not pretrained):
        raise JobError(
            f"{target}: the run has no checkpoint in {location}"
            + ("" if request.checkpoint else ", and the job has no 'model.pretrained'")
            + "; train first (d9d train), or give the directory of a model"
        )
    return Subject(target, _evaluated(job.resolved(), job, request.files), trained, request.checkpoint or "newest")


def _of_model(target: str, request: Request, registry: Registry) -> Subject:
    if request.like is not None:
        like = request.like
        if isinstance(like, Path):
            like = request.load(like)
        model = {"name": like.model.selector, "pretrained": target}
        values = {**like.resolved(), "model": model, "peft": None}
        values["loading"] = {**values["loading"], "weights": True}
        return Subject(target, _evaluated(values, like, request.files), run=False)
    if not request.files:
        raise JobError(
            f"{target}: nothing says on which data; add --data FILE.jsonl, or --like JOB for the data of a job"
        )
    config = read_config_json(target)
    most = config.get("max_position_embeddings")
    length = min(most, _LENGTH) if isinstance(most, int) and most > 0 else _LENGTH
    datasets = {path.stem: dataset_of(path, {"sequence_length": length // 8 * 8 or length}) for path in request.files}
    values = {
        "model": {"name": _model_of(target, config, registry), "pretrained": target},
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


def _evaluated(values: Mapping[str, Any], job: Job, files: Sequence[Path]) -> Job:
    """Job with the datasets to evaluate as sets, and nothing that only training needs."""
    section = job.evaluation
    if files:
        datasets = {path.stem: dataset_of(path, values["data"]) for path in files}
        if len(datasets) < len(files):
            raise JobError("--data: two files have one name, by which they would be told apart; rename one")
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


def _model_of(target: str, config: Mapping[str, Any], registry: Registry) -> str:
    """Name of the model whose Hugging Face layout reads a ``config.json``."""
    found = []
    for entry in registry.entries("model"):
        if not isinstance(entry.spec, ModelSpec) or entry.spec.hugging_face is None:
            continue
        try:
            entry.spec.hugging_face.load()().config_from_json(config)
        except (D9dError, *FOREIGN_FAILURES):
            continue
        found.append(entry)
    if len(found) == 1:
        return found[0].spec.key
    kind = ", ".join(map(str, config.get("architectures") or [])) or "no architecture"
    if not found:
        raise JobError(f"{target}: no installed model reads its config.json (it states {kind}); see d9d plugins")
    raise JobError(f"{target}: {', '.join(map(str, found))} read its config.json; give the one to use in a job: --like")


def _any_optimizer(registry: Registry) -> str:
    """Name of an optimizer: a job has to have one, and an evaluation does not build it."""
    names = sorted({entry.spec.key for entry in registry.entries("optimizer")})
    if not names:
        raise JobError("no optimizer is installed, which a job names even if it only evaluates; install d9d-optim")
    return "adamw" if "adamw" in names else names[0]
