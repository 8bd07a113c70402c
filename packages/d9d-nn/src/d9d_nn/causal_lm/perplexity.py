"""Metric ``perplexity``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from d9d_core.errors import JobError
from d9d_core.tensors import wide_dtype
from torch import Tensor

from d9d_nn.causal_lm.config import PerplexityConfig
from d9d_nn.ops.linear_cross_entropy import IGNORE


class Perplexity:
    """Perplexity ``exp(mean token loss)`` over all targets since the last reset.

    Reads the observations ``token_loss`` float [B, S] and ``targets`` int64 [B, S] of the task ``causal_lm``.

    Args:
        config: config of the metric, without settings.
    """

    def __init__(self, config: PerplexityConfig) -> None:
        self.config = config
        self._loss, self._targets, self._empty = _nothing(), _nothing(), True

    @property
    def reductions(self) -> Mapping[str, Literal["sum", "max", "min"]]:
        """Reduction of each state over ranks: sum."""
        return {"loss": "sum", "targets": "sum"}

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Add the losses of one microbatch.

        Raises:
            JobError: the task does not give both observations.
        """
        if missing := {"token_loss", "targets"} - observations.keys():
            raise JobError(
                f"metrics: perplexity needs {' and '.join(sorted(missing))}, but the task's observations() returns "
                f"only {', '.join(observations) or 'nothing'}; remove the metric, or use the task causal_lm"
            )
        token_loss, targets = observations["token_loss"], observations["targets"]
        predicted = targets != IGNORE
        dtype = wide_dtype(token_loss.device)  # in float32, sums over millions of tokens lose the last ones
        if self._loss.device != token_loss.device:
            self._loss = self._loss.to(token_loss.device, dtype, non_blocking=True)
            self._targets = self._targets.to(token_loss.device, dtype, non_blocking=True)
        self._loss = self._loss + torch.where(predicted, token_loss, 0.0).sum(dtype=dtype)
        self._targets = self._targets + predicted.sum(dtype=dtype)
        self._empty = False

    def state(self) -> dict[str, Tensor]:
        """Sum of losses and number of targets, 0-d."""
        return {"loss": self._loss, "targets": self._targets}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved or merged sums."""
        self._loss, self._targets = state["loss"], state["targets"]
        self._empty = False

    def compute(self) -> Mapping[str, Tensor]:
        """Compute the series ``perplexity``; empty before the first update. Without targets its value is 1, not NaN."""
        if self._empty:
            return {}
        return {"perplexity": torch.exp(self._loss / self._targets.clamp(min=1))}

    def reset(self) -> None:
        """Set the sums to zero on their device; copying new zeros there would make the host wait for the device."""
        self._loss, self._targets = torch.zeros_like(self._loss), torch.zeros_like(self._targets)
        self._empty = True


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.float64)
