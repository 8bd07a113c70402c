"""Resolution of a job: finds the plugin record of each name; checks that the records fit together. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from d9d_core.config import PluginConfig, closest
from d9d_core.data import ChoosesTensors
from d9d_core.errors import JobError
from d9d_core.job_file.evaluation import Evaluation
from d9d_core.job_file.inference import InferenceConfig
from d9d_core.job_file.inner import choose
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.job_file.sections.kernels import backend_names
from d9d_core.metric import ChoosesObservations
from d9d_core.plugin import DatasetSpec, InferenceTaskSpec, MetricSpec, ModelSpec, TaskSpec
from d9d_core.registry.capabilities import Chosen, Circumstances, Judge, Verdict, order
from d9d_core.registry.registry import Registry

__all__ = ["tensors_given"]

Part = tuple[Chosen, PluginConfig]
Selected = TypeVar("Selected", bound="Parts")
Selected_co = TypeVar("Selected_co", bound="Parts", covariant=True)


@dataclass(frozen=True)
class Parts:
    """Plugin records (declarations of components) that the names of a job of any kind select.

    Attributes:
        model, dataset, schedule, peft: one record each, or ``None``.
        strategies: records and configs in order of application.
        subscribers: records and configs in the order of the job file.
    """

    model: Chosen
    dataset: Chosen
    schedule: Chosen | None
    peft: Chosen | None
    strategies: Sequence[Part]
    subscribers: Sequence[Part]

    def all(self) -> list[Chosen]:
        """Every selected record, nested components included."""
        values = [getattr(self, field.name) for field in fields(self)]
        single = [value for value in values if isinstance(value, Chosen)]
        several = [chosen for value in values if not isinstance(value, Chosen | None) for chosen, _ in value]
        return [member for one in [*single, *several] for member in one.family()]


@dataclass(frozen=True)
class Selection(Parts):
    """Records that the names of a training job select; see :class:`Parts`.

    Attributes:
        task, optimizer, lr_schedule: one record each, or ``None``.
        metrics, trackers: records and configs in the order of the job file.
        evaluation: datasets of the evaluation, in the order of :attr:`d9d_core.job_file.job.Evaluation.datasets`.
        evaluation_metrics: metrics of the evaluation, in the order of the job file.
    """

    task: Chosen
    optimizer: Chosen
    lr_schedule: Chosen | None
    metrics: Sequence[Part]
    trackers: Sequence[Part]
    evaluation: Sequence[Part]
    evaluation_metrics: Sequence[Part]


@dataclass(frozen=True)
class InferenceSelection(Parts):
    """Records that the names of an inference job select; see :class:`Parts`.

    Attributes:
        task, writer: one record each.
    """

    task: Chosen
    writer: Chosen


@dataclass(frozen=True)
class Resolution(Generic[Selected_co]):
    """Records of a job that fit together.

    Attributes:
        selection: records of the job's names.
        verdicts: verdict on each required capability: satisfied, or undecided if it cannot be known yet.
        judge: decides whether later choices, such as backends of ops, fit these records.
    """

    selection: Selected_co
    verdicts: Sequence[Verdict]
    judge: Judge


def resolve(
    job: BaseJob, selection: Selected, registry: Registry, circumstances: Circumstances
) -> Resolution[Selected]:
    """Resolve a job of any kind: check that its selected records fit together.

    Args:
        job: validated job.
        selection: records of the job; see :func:`select_parts`.
        registry: registry that resolves names.
        circumstances: sizes of the mesh and type of the device, against which capabilities are checked.

    Raises:
        D9dError: the components of the job do not fit together.
    """
    if isinstance(selection, Selection):
        _check_metrics(selection)
    if isinstance(selection, Selection | InferenceSelection):
        _check_tensors(selection, job.data, registry)
    model = selection.model
    unformatted = isinstance(model.spec, ModelSpec) and model.spec.hugging_face is None
    if isinstance(job, JobConfig) and job.export == "adapter" and unformatted:
        raise JobError(f"export: model {model.entry} has no Hugging Face layout; set 'export: false'")
    resolution = judged(selection, registry, circumstances)
    for op, selector in backend_names(job.kernels):
        registry.find_kernel(op, selector)
    return resolution


def select_parts(job: BaseJob, registry: Registry) -> Parts:
    """Resolve every name of a job of any kind to its record.

    Raises:
        PluginError: a config object names a plugin that the registry does not have.
    """
    if isinstance(job, JobConfig):
        return select(job, registry)
    return select_inference(job, registry) if isinstance(job, InferenceConfig) else Parts(**_parts(job, registry))


def select_inference(job: InferenceConfig, registry: Registry) -> InferenceSelection:
    """Resolve every name of an inference job to its record.

    Raises:
        PluginError: a config object names a plugin that the registry does not have.
    """
    return InferenceSelection(
        **_parts(job, registry),
        task=choose(registry, "inference task", "task", job.task),
        writer=choose(registry, "writer", "writer", job.writer),
    )


def select(job: JobConfig, registry: Registry) -> Selection:
    """Resolve every name of a training job to its record.

    Raises:
        PluginError: a config object names a plugin that the registry does not have.
    """
    return Selection(
        **_parts(job, registry),
        task=choose(registry, "task", "task", job.task),
        optimizer=choose(registry, "optimizer", "optimizer", job.optimizer),
        lr_schedule=_maybe(registry, "lr schedule", "lr_schedule", job.lr_schedule),
        metrics=_several(registry, "metric", "metrics", job.metrics),
        trackers=_several(registry, "tracker", "trackers", job.trackers),
        evaluation=_evaluated(registry, job.evaluation),
        evaluation_metrics=_several(
            registry, "metric", "evaluation.metrics", job.evaluation.metrics if job.evaluation else ()
        ),
    )


def _evaluated(registry: Registry, evaluation: Evaluation | None) -> list[Part]:
    datasets = {} if evaluation is None else evaluation.datasets
    fields = {name: f"evaluation.sets.{name}" if name else "evaluation.data" for name in datasets}
    return [(choose(registry, "dataset", fields[name], config), config) for name, config in datasets.items()]


def _parts(job: BaseJob, registry: Registry) -> dict[str, Any]:
    """Keyword arguments of :class:`Parts`: the records that jobs of every kind select."""
    strategies = _several(registry, "strategy", "parallel", job.parallel)
    configs = {chosen.where: config for chosen, config in strategies}
    return {
        "model": choose(registry, "model", "model", job.model),
        "dataset": choose(registry, "dataset", "data", job.data),
        "schedule": _maybe(registry, "schedule", "pipeline", job.pipeline),
        "peft": _maybe(registry, "peft method", "peft", job.peft),
        "strategies": [(chosen, configs[chosen.where]) for chosen in order(chosen for chosen, _ in strategies)],
        "subscribers": _several(registry, "subscriber", "subscribers", job.subscribers),
    }


def _maybe(registry: Registry, kind: str, where: str, config: PluginConfig | None) -> Chosen | None:
    return None if config is None else choose(registry, kind, where, config)


def _several(registry: Registry, kind: str, where: str, configs: Iterable[PluginConfig]) -> list[Part]:
    return [(choose(registry, kind, f"{where}[{index}]", config), config) for index, config in enumerate(configs)]


def judged(selection: Selected, registry: Registry, circumstances: Circumstances) -> Resolution[Selected]:
    """Check every requirement of every selected record.

    Raises:
        JobError: one line per unsatisfied requirement.
    """
    chosen = selection.all()
    judge = Judge(chosen, registry, circumstances)
    verdicts = [verdict for item in chosen for verdict in judge.verdicts(item)]
    failed = [f"{v.chosen.where}: {v.reason}" for v in verdicts if v.satisfied is False]
    if failed:
        raise JobError("\n".join(failed))
    return Resolution(selection, verdicts, judge)


def _check_metrics(selection: Selection) -> None:
    task = selection.task.spec
    if not isinstance(task, TaskSpec) or task.observes is None:
        return
    known = task.observes | task.on_demand
    failed = []
    for chosen, config in (*selection.metrics, *selection.evaluation_metrics):
        for missing in sorted(observations_read(chosen, config) - known):
            near = closest(missing, sorted(known))
            hint = f"did you mean '{near}'? " if near else ""
            has = f"{hint}the task observes: {', '.join(sorted(known)) or 'nothing'}"
            does_not = f"which task {selection.task.entry} does not observe; {has}"
            failed.append(f"{chosen.where}: metric {chosen.entry} reads {missing}, {does_not}")
    if failed:
        raise JobError("\n".join(failed))


def _check_tensors(selection: Selection | InferenceSelection, data: PluginConfig, registry: Registry) -> None:
    """Compare the tensors that the task reads with the tensors that each dataset gives, where records declare them."""
    task = selection.task.spec
    if not isinstance(task, TaskSpec | InferenceTaskSpec):
        return
    others = selection.evaluation if isinstance(selection, Selection) else ()
    failed = []
    for chosen, config in ((selection.dataset, data), *others):
        given = tensors_given(chosen, config)
        if given is None:
            continue
        where, dataset = f"{chosen.where}: task {selection.task.entry} reads", f"dataset {chosen.entry}"
        if missing := ", ".join(sorted(task.reads.keys() - given.keys())):
            do = _quoted(_giving(registry, task.reads))
            hint = (
                f"{do} does"
                if do.count("'") == 2
                else f"{do} do"
                if do
                else "no installed dataset is declared to give it"
            )
            failed.append(f"{where} {missing}, which {dataset} does not give; {hint}")
        failed += [
            f"{where} {name} of {_dims(dims)}, but {dataset} gives {name} of {_dims(given[name])}; choose another "
            "dataset, other fields of this dataset, or another task"
            for name, dims in sorted(task.reads.items())
            if given.get(name, dims) != dims
        ]
    if failed:
        raise JobError("\n".join(failed))


def tensors_given(dataset: Chosen, config: object) -> Mapping[str, int] | None:
    """Tensors in every microbatch of a dataset: name -> number of dimensions; ``None`` if unknown.

    Args:
        dataset: record of the dataset.
        config: config of the dataset; may be a :class:`~d9d_core.data.ChoosesTensors`, whose fields decide.
    """
    spec = dataset.spec
    assert isinstance(spec, DatasetSpec)
    if isinstance(config, ChoosesTensors):
        return config.gives
    if spec.gives != "inner":
        return spec.gives
    inside = [tensors_given(inner, of) for inner, of in dataset.inner if isinstance(inner.spec, DatasetSpec)]
    known = [given.items() for given in inside if given is not None]
    return dict(set(known[0]).intersection(*known[1:])) if known and len(known) == len(inside) else None


def _giving(registry: Registry, tensors: Mapping[str, int]) -> list[str]:
    """Names of the installed datasets whose records declare all of these tensors, for an error message."""
    specs = [entry.spec for entry in registry.entries("dataset")]
    return sorted(
        spec.name
        for spec in specs
        if isinstance(spec, DatasetSpec) and isinstance(spec.gives, Mapping) and tensors.items() <= spec.gives.items()
    )


def _dims(count: int) -> str:
    return "1 dim" if count == 1 else f"{count} dims"


def _quoted(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return " and ".join(filter(None, [", ".join(quoted[:-1]), *quoted[-1:]]))


def observations_read(chosen: Chosen, config: PluginConfig) -> Set[str]:
    """Observations that a metric, or a metric nested in it, requires."""
    assert isinstance(chosen.spec, MetricSpec)
    own = config.reads if isinstance(config, ChoosesObservations) else chosen.spec.reads
    inside = [observations_read(inner, of) for inner, of in chosen.inner if isinstance(of, PluginConfig)]
    return frozenset(own).union(*inside)
