"""Metric ``auroc``. Shapes: N samples, K bins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.tensors import wide_dtype
from torch import Tensor

from d9d_metrics.auroc.config import AurocConfig
from d9d_metrics.confusion.alignment import align_binary
from d9d_metrics.observations import IGNORE, read


class Auroc(AccumulatedMetric):
    """Metric AUROC, area under the ROC curve: probability that a positive sample outscores a negative sample.

    Samples are counted in bins of their probability. A pair of a positive and a negative sample in different bins
    counts exactly; a pair in the same bin counts half, like a tie. The value therefore differs from the exact area by
    at most ``sum(p * n) / (2 * P * N)`` over bins with p of the P positive and n of the N negative samples: the series
    ``<series>/error_bound``. Counts are int64. The value is NaN if only one class occurs, a target is not 0, 1 or -100,
    or a score is NaN.

    Args:
        config: config of the metric.
    """

    def __init__(self, config: AurocConfig) -> None:
        bins = Accumulator(shape=(config.num_bins,), dtype=torch.int64)
        super().__init__(positive=bins, negative=bins, outside=Accumulator(dtype=torch.int64))
        self.config = config

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Count one microbatch.

        Raises:
            JobError: an observation is missing, or shapes do not fit.
        """
        config = self.config
        names = (config.predictions, config.targets)
        predictions, targets = (read(observations, name, config.name).detach() for name in names)
        probabilities, targets = align_binary(predictions, targets, config.scores, names)
        valid = ((targets == 0) | (targets == 1)) & ~probabilities.isnan()
        places = (probabilities.nan_to_num(0) * config.num_bins).clamp(0, config.num_bins - 1).long()
        self.accumulate(
            positive=self._histogram(places, valid & (targets == 1)),
            negative=self._histogram(places, valid & (targets == 0)),
            outside=((targets != IGNORE) & ~valid).sum(),
        )

    def _histogram(self, places_N: Tensor, counted_N: Tensor) -> Tensor:
        none = torch.zeros(self.config.num_bins, dtype=torch.int64, device=places_N.device)
        return none.scatter_add_(0, places_N, counted_N.long())

    def compute(self) -> Mapping[str, Tensor]:
        """Compute the series ``auroc`` and its error bound."""
        wide = wide_dtype(self["positive"].device)
        positive_K, negative_K = self["positive"].to(wide), self["negative"].to(wide)
        pairs = positive_K.sum() * negative_K.sum()
        pairs = torch.where(self["outside"] > 0, torch.nan, pairs)
        above_K = positive_K.sum() - positive_K.cumsum(0)  # positive samples in higher bins
        ties = (positive_K * negative_K).sum() / 2
        area = ((negative_K * above_K).sum() + ties) / pairs
        return {self.config.series: area, f"{self.config.series}/error_bound": ties / pairs}
