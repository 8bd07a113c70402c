"""Check of the series that a job reads, as far as logged series are known before the data is read."""

from __future__ import annotations

from d9d_core.config import closest
from d9d_core.errors import JobError
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection

from d9d_engine.compose.assemble import Assembly
from d9d_engine.run.evaluation import likelihood_of, prefix_of, series_of_sets
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.subscribers.config import EarlyStoppingConfig

#: Series that every run logs; with several loss terms, also one series per term.
_ALWAYS = ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "skipped_steps")


def check_series(job: JobConfig, selection: Selection, assembly: Assembly, task: CheckedTask, own_task: object) -> None:
    """Check that the series read by the best checkpoint and by early stopping will be logged.

    Needs no data. Series of metrics are not known yet, so with metrics an unknown name is accepted.

    Args:
        job: validated job.
        selection: plugin records of the job.
        assembly: assembled model, whose modules may add loss terms.
        task: checked task, with its loss terms.
        own_task: the unwrapped task.

    Raises:
        D9dError: a series will never be logged, or two loss terms have the same name.
    """
    best = job.checkpoint.best
    reads = [("checkpoint.best", best.series)] if best else []
    for chosen, config in selection.subscribers:
        if isinstance(config, EarlyStoppingConfig):
            reads.append((chosen.where, config.series))
    terms = {**task.coefficients, **AuxiliaryLosses(assembly.stages, assembly.full_model, task).coefficients}
    training = {*_ALWAYS, *(f"loss/{term}" for term in terms if len(terms) > 1)}
    names = [] if job.evaluation is None else list(job.evaluation.datasets)
    evaluated = set(series_of_sets(names, task.coefficients, likelihood_of(own_task)))
    for where, series in reads:
        if series in training | evaluated:
            continue
        of_evaluation = series.startswith("eval/")
        why = ""
        if of_evaluation and job.evaluation is None:
            why = "; the job has no evaluation section"
        elif of_evaluation and job.evaluation is not None and (job.evaluation.metrics or task.own_metrics()):
            if series.startswith(tuple(prefix_of(name) for name in names)):
                continue
        elif not of_evaluation and (selection.metrics or task.own_metrics()):
            continue
        near = closest(series, sorted(training | evaluated))
        known = ", ".join(sorted(evaluated if of_evaluation and evaluated else training | evaluated))
        hint = why or (f"; did you mean '{near}'?" if near else f"; there are: {known}")
        raise JobError(f"{where}.series: '{series}' is never logged{hint}")
