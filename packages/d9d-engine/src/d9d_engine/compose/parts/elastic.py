"""Sums of a step over elastic replicas, if a strategy of the job declares such replicas."""

from __future__ import annotations

from d9d_core.errors import BuildError

from d9d_engine.compose.assemble import Assembly
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.elastic import SharedStep
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.metrics import Statistics


def build_shared_step(
    assembly: Assembly,
    task: CheckedTask,
    auxiliary_losses: AuxiliaryLosses,
    tallies: Tallies,
    gradients: Gradients,
    statistics: Statistics,
) -> SharedStep | None:
    """Build the object that sums a step's results over elastic replicas; ``None`` if no strategy declares replicas.

    Args:
        assembly: assembled stages.
        task: task of the job.
        auxiliary_losses: loss terms of the model's modules.
        tallies: counts of the model's modules.
        gradients: gradients of a step.
        statistics: metrics of the run.

    Raises:
        BuildError: another part of the job prevents the replicas from sharing a step.
    """
    outcomes = [(f"{chosen.where} ({chosen.spec.name})", outcome) for chosen, outcome in assembly.applied]
    elastic = [(strategy, outcome.elastic) for strategy, outcome in outcomes if outcome.elastic is not None]
    if not elastic:
        return None
    (strategy, replicas), *more = elastic
    if more:
        raise BuildError(f"{strategy} and {more[0][0]} both declare elastic replicas; remove one of them")
    if len(assembly.all_stages) > 1:
        raise BuildError(
            f"{strategy} gives each replica a part of the microbatches, but a pipeline's schedule needs a fixed "
            "number of microbatches; remove 'pipeline' and mesh.pp"
        )
    for other, outcome in outcomes:
        own = outcome.meetings is not None or outcome.resynchronise is not None
        if own or any(entry.operation == "max" for entry in outcome.gradients):
            what = "lets replicas take their own steps" if own else "reduces gradients by their maximum"
            raise BuildError(f"{other} {what}, but {strategy} sums gradients over all replicas; remove one of them")
    terms = [*task.coefficients, *auxiliary_losses.coefficients]
    return SharedStep(replicas, gradients, statistics, tallies, terms, task.late)
