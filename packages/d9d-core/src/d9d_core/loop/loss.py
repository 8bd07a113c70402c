"""The weight of a loss, known before the first backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from d9d_core.protocols import Pack, Task


class LossScale:
    """Computes what each loss sum is multiplied by, so that gradients need no scaling pass.

    A term's factor is its coefficient over its weight in the whole pack. A term without weight gets the factor zero.

    Args:
        task: declares the terms and their weights.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    def begin(self, pack: Pack) -> Mapping[str, Tensor]:
        """Term -> 1 / (weight in this pack), 0-d float32 on the device; zero where there is no weight."""
        weights = [self._task.weights(microbatch) for microbatch in pack]
        terms = list(self._task.coefficients)
        total = torch.stack([torch.stack([w[term].float() for term in terms]) for w in weights]).sum(0)
        inverse = torch.where(total > 0, 1 / total, torch.zeros_like(total))
        return dict(zip(terms, inverse.unbind(), strict=True))
