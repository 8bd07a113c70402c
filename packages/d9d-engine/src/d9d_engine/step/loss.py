"""Factors of the loss terms in a step, which are usually known before the first backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.types import Pack
from torch import Tensor
from torch import distributed as dist

from d9d_engine.step.auxiliary_losses import AuxiliaryLosses
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.executor import StageLoss
from d9d_engine.step.gradients import Gradients


class LossScale:
    """Factor for each sum of a loss term, so that gradients need no scaling pass.

    A factor is 1 / (the term's weight over all ranks' packs), and zero without weight. If the weight depends on outputs
    (:class:`~d9d_core.task.WeighsOutputs`), gradients are scaled after the last backward instead.

    Args:
        task: task that declares terms and weights.
        auxiliary_losses: loss terms of the model's modules.
        group: process group of the ranks with other samples or parts of samples; ``None`` for a single rank.
        everywhere: process group of the ranks of ``group`` in all pipeline stages.

    Raises:
        BuildError: the task weighs outputs, and modules of the model add loss terms.
    """

    def __init__(
        self,
        task: CheckedTask,
        auxiliary_losses: AuxiliaryLosses,
        group: dist.ProcessGroup | None = None,
        everywhere: dist.ProcessGroup | None = None,
    ) -> None:
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
        """Compute each term's factor: 1 / (its weight in all ranks' packs), 0-d float32; zero if the weight is zero.

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
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        inverse = torch.where(total > 0, 1 / total, torch.zeros_like(total))
        return dict(zip(terms, inverse.unbind(), strict=True))

    def settle(self, loss: StageLoss, gradients: Gradients) -> StageLoss:
        """Scale loss and gradients if the weight depends on outputs. Collective over all ranks in that case.

        Args:
            loss: sums of the terms, and the weight of this rank's outputs.
            gradients: reduced but unscaled gradients.

        Returns:
            The loss, as this rank's share of the means.
        """
        if not self._task.late:
            return loss
        total = loss.weight
        if total is None:  # this rank has no outputs
            total = torch.zeros((), device=gradients.device)
        total = total.detach().float().clone()
        if self._everywhere is not None:
            dist.all_reduce(total, group=self._everywhere)
        factor = torch.where(total > 0, 1 / total, torch.zeros_like(total))
        gradients.scale(factor)
        return StageLoss({term: value * factor for term, value in loss.terms.items()})


def on_device(number: int | float | Tensor, like: Tensor) -> Tensor:
    """Convert a number, or a 0-d device tensor, to a tensor [1] with the device and dtype of ``like``."""
    if isinstance(number, Tensor):
        return number.to(like.dtype).reshape(1)
    # Filled by a kernel: a copy from the host would wait for the device.
    return like.new_full((1,), number)
