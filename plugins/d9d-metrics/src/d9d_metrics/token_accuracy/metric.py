"""Metric ``token_accuracy``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.errors import JobError
from torch import Tensor

from d9d_metrics.observations import read
from d9d_metrics.token_accuracy.config import TokenAccuracyConfig


class TokenAccuracy(AccumulatedMetric):
    """Top-k token accuracy: exact fraction of the targets whose rank is less than k.

    The loss op counts a target's rank: the number of tokens that are more probable than the target.

    Args:
        config: config with the numbers k.
    """

    def __init__(self, config: TokenAccuracyConfig) -> None:
        long = torch.int64
        super().__init__(hits=Accumulator(shape=(len(config.top),), dtype=long), targets=Accumulator(dtype=long))
        self.config = config

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Count the targets of one microbatch, and the targets among the k most probable tokens.

        Raises:
            JobError: the task does not give the observation of the ranks.
        """
        if self.config.ranks == "token_ranks" and "token_ranks" not in observations:
            raise JobError(
                "metrics: token_accuracy reads 'token_ranks', which the head of a language model from d9d-nn computes "
                "when a metric of the job reads it; this model has another head, and the task's observations() "
                f"returns: {', '.join(sorted(observations)) or 'nothing'}"
            )
        ranks = read(observations, self.config.ranks, self.config.name)
        predicted = ranks >= 0
        hits = [(predicted & (ranks < top)).sum() for top in self.config.top]
        self.accumulate(hits=torch.stack(hits), targets=predicted.sum())

    def compute(self) -> Mapping[str, Tensor]:
        """Series ``token_accuracy_top_<k>``; NaN before the first target."""
        shares = self["hits"] / self["targets"]
        return {f"token_accuracy_top_{top}": share for top, share in zip(self.config.top, shares.unbind(), strict=True)}
