"""Resolution of a job: the records that its names select, and whether they go together. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from d9d_core.config.base import PluginConfig
from d9d_core.config.inner import choose
from d9d_core.config.job import JobConfig
from d9d_core.errors import JobError
from d9d_core.plugin.capabilities import Chosen, Circumstances, Verdict, judge, order
from d9d_core.plugin.kernels import find_kernel
from d9d_core.plugin.records import MetricSpec, ModelSpec, TaskSpec
from d9d_core.plugin.registry import Registry

Part = tuple[Chosen, PluginConfig]


@dataclass(frozen=True)
class Selection:
    """Records that the names of a job resolve to.

    Attributes:
        model, task, dataset, optimizer, lr_schedule, schedule, peft: one record each, where the job has one.
        strategies: in order of application.
        metrics, trackers, subscribers: as listed.
        evaluation: the evaluation's dataset.
    """

    model: Chosen
    task: Chosen
    dataset: Chosen
    optimizer: Chosen
    lr_schedule: Chosen | None
    schedule: Chosen | None
    peft: Chosen | None
    evaluation: Chosen | None
    strategies: Sequence[Part]
    metrics: Sequence[Part]
    trackers: Sequence[Part]
    subscribers: Sequence[Part]

    def all(self) -> list[Chosen]:
        """Every chosen record, and those of components inside of components."""
        single = (
            self.model,
            self.task,
            self.dataset,
            self.optimizer,
            self.lr_schedule,
            self.schedule,
            self.peft,
            self.evaluation,
        )
        several = (self.strategies, self.metrics, self.trackers, self.subscribers)
        chosen = [c for c in single if c is not None] + [chosen for parts in several for chosen, _ in parts]
        return [member for one in chosen for member in one.family()]


@dataclass(frozen=True)
class Resolution:
    """Records of a job, looked up and compatible with each other.

    Attributes:
        selection: records behind the job's names.
        verdicts: capabilities, satisfied or undecided.
    """

    selection: Selection
    verdicts: Sequence[Verdict]


def resolve(job: JobConfig, registry: Registry, circumstances: Circumstances) -> Resolution:
    """Resolve a job: look up its names and check them against each other.

    Args:
        job: validated.
        registry: meaning of its names.
        circumstances: what capabilities are judged against.

    Raises:
        D9dError: the components of the job do not go together.
    """
    selection = select(job, registry)
    check_parts(job, selection)
    verdicts = check_capabilities(selection, registry, circumstances)
    for op, selector in job.kernels.items():
        find_kernel(registry, op, selector)
    return Resolution(selection, verdicts)


def select(job: JobConfig, registry: Registry) -> Selection:
    """Resolve every name of the job to its record.

    Raises:
        PluginError: a config object names a plugin that the registry does not have.
    """

    def one(kind: str, where: str, config: PluginConfig) -> Chosen:
        return choose(registry, kind, where, config)

    def maybe(kind: str, where: str, config: PluginConfig | None) -> Chosen | None:
        return None if config is None else one(kind, where, config)

    def several(kind: str, where: str, configs: Iterable[PluginConfig]) -> list[Part]:
        return [(one(kind, f"{where}[{index}]", config), config) for index, config in enumerate(configs)]

    strategies = several("strategy", "parallel", job.parallel)
    configs = {chosen.where: config for chosen, config in strategies}
    return Selection(
        model=one("model", "model", job.model),
        task=one("task", "task", job.task),
        dataset=one("dataset", "data", job.data),
        optimizer=one("optimizer", "optimizer", job.optimizer),
        lr_schedule=maybe("lr schedule", "lr_schedule", job.lr_schedule),
        schedule=maybe("schedule", "pipeline", job.pipeline),
        peft=maybe("peft method", "peft", job.peft),
        evaluation=maybe("dataset", "evaluation.data", job.evaluation.data if job.evaluation else None),
        strategies=[(chosen, configs[chosen.where]) for chosen in order(chosen for chosen, _ in strategies)],
        metrics=several("metric", "metrics", job.metrics),
        trackers=several("tracker", "trackers", job.trackers),
        subscribers=several("subscriber", "subscribers", job.subscribers),
    )


def check_capabilities(selection: Selection, registry: Registry, circumstances: Circumstances) -> list[Verdict]:
    """Check every requirement of every chosen record.

    Raises:
        JobError: one line per requirement that does not hold.
    """
    verdicts = judge(selection.all(), registry, circumstances)
    failed = [f"{v.chosen.where}: {v.reason}" for v in verdicts if v.satisfied is False]
    if failed:
        raise JobError("\n".join(failed))
    return verdicts


def check_parts(job: JobConfig, selection: Selection) -> None:
    """Check that the model of the resolved job can be exported, and that its metrics find what they read.

    Raises:
        JobError: the model cannot be exported, or a metric reads what the task does not observe.
    """
    _check_metrics(selection)
    if job.export and isinstance(selection.model.spec, ModelSpec) and selection.model.spec.hugging_face is None:
        raise JobError(f"export: model {selection.model.entry} has no Hugging Face layout; set 'export: false'")


def _check_metrics(selection: Selection) -> None:
    task = selection.task.spec
    if not isinstance(task, TaskSpec) or task.observes is None:
        return
    failed = []
    for chosen, _ in selection.metrics:
        assert isinstance(chosen.spec, MetricSpec)
        if missing := chosen.spec.reads - task.observes:
            names, has = ", ".join(sorted(missing)), ", ".join(sorted(task.observes)) or "nothing"
            does_not = f"which task {selection.task.entry} does not observe; it observes: {has}"
            failed.append(f"{chosen.where}: metric {chosen.entry} reads {names}, {does_not}")
    if failed:
        raise JobError("\n".join(failed))
