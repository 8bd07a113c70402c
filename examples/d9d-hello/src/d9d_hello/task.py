"""Task ``smooth_lm``. Shapes: B samples, S positions, V vocabulary size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor
from torch.nn import functional

from d9d_hello.config import SmoothLMConfig

_IGNORE = -100


class SmoothLM:
    """Task with one loss term; the model returns ``logits`` [B, S, V] because it gets no targets."""

    def __init__(self, config: SmoothLMConfig) -> None:
        self._smoothing = config.smoothing

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficient of each loss term in the loss, by the term's name."""
        return {"smooth": 1.0}

    def check(self, model: Any, facts: State) -> None:
        """Check model and data before training; this task checks nothing, because the model checks its inputs."""

    def count(self, microbatch: Microbatch) -> int:
        """Number of tokens, B x S."""
        return microbatch["tokens"].numel()

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Number of targets; the trainer divides the summed loss by it, so that the loss is a mean over targets."""
        return {"smooth": (microbatch["targets"] != _IGNORE).sum(dtype=torch.float32)}

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Model inputs: the tokens, and positions and documents if the microbatch has them; no targets."""
        shared = {name: microbatch[name] for name in ("positions", "documents") if name in microbatch}
        return StageInputs(first={"tokens": microbatch["tokens"]}, shared=shared)

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sum of the cross-entropies with smoothed targets."""
        logits, targets = outputs["logits"].float().flatten(0, 1), microbatch["targets"].flatten()
        loss = functional.cross_entropy(
            logits, targets, reduction="sum", ignore_index=_IGNORE, label_smoothing=self._smoothing
        )
        return {"smooth": loss}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Tensors that metrics may read: the logits and the targets."""
        return {"logits": outputs["logits"].detach(), "targets": microbatch["targets"]}
