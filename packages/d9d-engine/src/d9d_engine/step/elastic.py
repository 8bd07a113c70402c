"""Attempts at a step that elastic replicas share: sums over the replicas, and undoing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from d9d_core.accumulators import Operation
from d9d_core.elastic import ElasticReplicas

from d9d_engine.step.auxiliary_losses import Tallies
from d9d_engine.step.executor import StageLoss
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.metrics import Statistics


class UndoneError(Exception):
    """An attempt at a step was undone, because a replica was lost; the state is as before the attempt."""


class SharedStep:
    """Sums gradients, losses, metrics and tallies of a step over elastic replicas, which share its microbatches.

    Args:
        replicas: replicas that share the step.
        gradients: gradients of the step.
        statistics: metrics, to which each replica adds its own microbatches.
        tallies: counts of the model's modules.
        terms: loss terms.
        late: whether the loss weight depends on the model's outputs (:class:`~d9d_core.task.WeighsOutputs`).
    """

    def __init__(
        self,
        replicas: ElasticReplicas,
        gradients: Gradients,
        statistics: Statistics,
        tallies: Tallies,
        terms: Sequence[str],
        late: bool,
    ) -> None:
        self.replicas = replicas
        self._gradients = gradients
        self._statistics = statistics
        self._tallies = tallies
        self._terms = list(terms)
        self._late = late

    def begin(self) -> None:
        """Set the states of the metrics aside, so that a step's own updates can be summed or undone."""
        self._statistics.set_aside()

    @torch.no_grad()
    def settle(self, loss: StageLoss) -> StageLoss:
        """Sum gradients, losses, metrics and tallies over the replicas. Collective over all ranks of all replicas.

        Waits for the device, because the host decides whether the step counts.

        Args:
            loss: loss of the microbatches that this replica has run.

        Returns:
            The loss of all microbatches of this rank's pack.

        Raises:
            UndoneError: a replica was lost; the attempt is undone.
        """
        none = torch.zeros((), device=self._gradients.device)
        losses = torch.stack([loss.terms.get(term, none).float() for term in self._terms])
        weight = None if not self._late else (none if loss.weight is None else loss.weight).float().clone()
        summed = [*self._gradients.final(), losses, *self._tallies.sums()]
        self.replicas.reduce(summed if weight is None else [*summed, weight], "sum")
        updates = self._statistics.updates()
        for (operation, _), buffer in updates.buffers.items():
            self.replicas.reduce([buffer], cast("Operation", operation))
        if not self.replicas.commit():
            self._statistics.take_back()
            self._tallies.forget()
            self._gradients.reset()
            raise UndoneError
        self._statistics.merge(updates)
        return StageLoss(dict(zip(self._terms, losses.unbind(), strict=True)), weight)
