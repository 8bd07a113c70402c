"""Factors of the loss terms in a step, which are usually known before the first backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.types import Pack
from torch import Tensor
from torch import distributed as dist

from d9d_engine.step.auxiliary_losses import AuxiliaryLosses
from d9d_engine.step.checked_task import LossTask
from d9d_engine.step.executor import StageLoss
from d9d_engine.step.gradients import Gradients


class LossScale:
    """Factor for each sum of a loss term, so that gradients need no scaling pass.

    A factor is 1 / (the term's weight over the step's microbatches on all ranks), or zero if this weight is zero. If
    the weight depends on outputs (:class:`~d9d_core.task.WeighsOutputs`), gradients are scaled after the last backward
    instead. If replicas take their own steps, only the weights of the replica's own ranks count, and :meth:`settle`
    turns the losses into shares of the means over all ranks.

    Args:
        task: task that declares terms and weights.
        auxiliary_losses: loss terms of the model's modules.
        group: process group of the ranks with other samples, or other positions of the same samples; ``None`` for a
            single rank.
        everywhere: process group of the ranks of ``group`` in all pipeline stages.
        place: index of this rank's replica, and number of replicas that take their own steps.

    Raises:
        BuildError: the task weighs outputs, and modules of the model add loss terms.
    """

    def __init__(
        self,
        task: LossTask,
        auxiliary_losses: AuxiliaryLosses,
        group: dist.ProcessGroup | None = None,
        everywhere: dist.ProcessGroup | None = None,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        self._replica, self._replicas = place
        self._shares: Mapping[str, Tensor] = {}
        #: This replica's share, 0 to 1, of the first term's weight in the last step, 0-d; ``None`` with one replica.
        self.share: Tensor | None = None
        self._task = task
        self._auxiliary = auxiliary_losses
        self._group = group
        self._everywhere = everywhere
        if task.late and auxiliary_losses.terms:
            raise BuildError(
                f"the weight of the task's loss depends on outputs, but modules of the model add loss terms too "
                f"({', '.join(auxiliary_losses.terms)}), whose gradients cannot be separated; switch these terms off"
            )

    def begin(self, pack: Pack) -> Mapping[str, Tensor]:
        """Compute each term's factor, 0-d float32: 1 / (its weight over the replica's ranks), zero for a zero weight.

        Collective over the group.
        """
        if self._task.late:
            one = torch.ones((), device=next(iter(pack[0].values())).device)
            return dict.fromkeys(self._task.coefficients, one)
        weights = [self._task.weights(microbatch) for microbatch in pack]
        terms = list(self._task.coefficients)
        total = torch.stack([torch.stack([w[term].float() for term in terms]) for w in weights]).sum(0)
        if self._auxiliary.terms:
            counts = [self._auxiliary.weights(microbatch) for microbatch in pack]
            added = [on_device(sum(count[term] for count in counts), total) for term in self._auxiliary.terms]
            terms, total = [*terms, *self._auxiliary.terms], torch.cat([total, *added])
        own, share = self._reduced(total, self._group)
        if self._replicas > 1:
            self._shares = dict(zip(terms, share.unbind(), strict=True))
            self.share = share[0]
        return dict(zip(terms, _inverse(own).unbind(), strict=True))

    def _reduced(self, weights: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Sum weights over the replica's own ranks; return the sums, and their shares of the sums over all ranks."""
        if self._replicas == 1:
            if group is not None:
                dist.all_reduce(weights, group=group)
            return weights, weights
        # Reduce the sums of all replicas in one message; each replica has its own row.
        table = weights.new_zeros(self._replicas, *weights.shape)
        table[self._replica] = weights
        dist.all_reduce(table, group=group)
        own = table[self._replica]
        return own, own * _inverse(table.sum(0))

    def settle(self, loss: StageLoss, gradients: Gradients) -> StageLoss:
        """Scale loss and gradients if the weight depends on outputs. Collective over all ranks in that case.

        Otherwise, both were scaled before the backward. If replicas take their own steps, the loss is also scaled, in
        both cases, by the replica's share of the weight.

        Args:
            loss: sums of the terms, and the weight of this rank's outputs.
            gradients: reduced gradients; unscaled if the weight depends on outputs.

        Returns:
            The loss, as this rank's share of the means.
        """
        if not self._task.late:
            if self._replicas == 1:
                return loss
            return StageLoss({term: value * self._shares[term] for term, value in loss.terms.items()})
        total = loss.weight
        if total is None:  # this rank has no outputs
            total = torch.zeros((), device=gradients.device)
        own, share = self._reduced(total.detach().float().clone(), self._everywhere)
        factor = _inverse(own)
        gradients.scale(factor)
        if self._replicas > 1:
            self.share, factor = share, factor * share
        return StageLoss({term: value * factor for term, value in loss.terms.items()})


def _inverse(weights: Tensor) -> Tensor:
    return torch.where(weights > 0, 1 / weights, torch.zeros_like(weights))


def on_device(number: int | float | Tensor, like: Tensor) -> Tensor:
    """Convert a number, or a 0-d device tensor, to a tensor [1] with the device and dtype of ``like``."""
    if isinstance(number, Tensor):
        return number.to(like.dtype).reshape(1)
    # A kernel fills the tensor; a copy from the host would wait for the device.
    return like.new_full((1,), number)
