"""AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from d9d_optim.optimizer.adam import FusedAdam
from d9d_optim.optimizer.config import AdamWConfig


class AdamW(FusedAdam):
    """AdamW with the same bits as ``torch.optim.AdamW(fused=True)``, gated steps and state by name.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` of its shape, with ``amsgrad`` ``max_exp_avg_sq``, and ``step``
    (0-d float32, taken steps).
    """

    def __init__(self, config: AdamWConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters, decoupled=True)
