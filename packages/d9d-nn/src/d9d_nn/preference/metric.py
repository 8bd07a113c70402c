"""Metric ``preference``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from d9d_core.errors import JobError
from d9d_core.tensors import wide_dtype
from torch import Tensor

from d9d_nn.preference.config import PreferenceMetricConfig

_READS = ("chosen_rewards", "rejected_rewards")


class PreferenceMetric:
    """Metric of preferences since the last reset: mean rewards and margin, and how often the chosen reward is higher.

    Reads the observations ``chosen_rewards`` and ``rejected_rewards``, float [B] each, of the task ``dpo``.

    Args:
        config: config of the metric, which has no settings.
    """

    def __init__(self, config: PreferenceMetricConfig) -> None:
        self.config = config
        # Sums of chosen and of rejected rewards, number of pairs whose chosen text has the higher one, number of pairs.
        self._sums, self._empty = torch.zeros(4, dtype=torch.float64), True

    @property
    def reductions(self) -> Mapping[str, Literal["sum", "max", "min"]]:
        """Reduction of the state over ranks: sum."""
        return {"sums": "sum"}

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Add the pairs of one microbatch.

        Raises:
            JobError: the task does not give both observations.
        """
        if missing := set(_READS) - observations.keys():
            raise JobError(
                f"metrics: preference needs {' and '.join(sorted(missing))}, but the task's observations() returns "
                f"only {', '.join(observations) or 'nothing'}; remove the metric, or use the task dpo"
            )
        chosen, rejected = (observations[name] for name in _READS)
        dtype = wide_dtype(chosen.device)
        if self._sums.device != chosen.device:
            self._sums = self._sums.to(chosen.device, dtype, non_blocking=True)
        ones = torch.ones_like(chosen)
        rows = torch.stack([chosen, rejected, (chosen > rejected).to(chosen.dtype), ones])
        self._sums = self._sums + rows.sum(1, dtype=dtype)
        self._empty = False

    def state(self) -> dict[str, Tensor]:
        """Sums of chosen and rejected rewards, number of pairs with a higher chosen reward, number of pairs: [4]."""
        return {"sums": self._sums}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved or merged sums."""
        self._sums, self._empty = state["sums"], False

    def compute(self) -> Mapping[str, Tensor]:
        """Series ``preference/chosen``, ``/rejected``, ``/margin`` and ``/accuracy``; empty before an update."""
        if self._empty:
            return {}
        chosen, rejected, right, pairs = self._sums.unbind()
        pairs = pairs.clamp(min=1)
        return {
            "preference/chosen": chosen / pairs,
            "preference/rejected": rejected / pairs,
            "preference/margin": (chosen - rejected) / pairs,
            "preference/accuracy": right / pairs,
        }

    def reset(self) -> None:
        """Set the sums to zero on their device; copying new zeros there would make the host wait for the device."""
        self._sums, self._empty = torch.zeros_like(self._sums), True
