"""AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.extend import OpSlot
from torch import nn

from d9d_optim.optimizer.adam import FusedAdam
from d9d_optim.optimizer.base import Batch
from d9d_optim.optimizer.config import AdamWConfig


class AdamW(FusedAdam):
    """AdamW with the same bits as ``torch.optim.AdamW(fused=True)``, gated steps and state by name.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` of its shape, with ``amsgrad`` ``max_exp_avg_sq``, and ``step``
    (0-d float32, taken steps).

    Its step is the op ``adamw``: a backend is called with a :class:`~d9d_optim.optimizer.base.Batch` and the keywords
    ``betas`` and ``eps``. Facts of the slot: ``amsgrad`` and ``maximize``.
    """

    def __init__(self, config: AdamWConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters, decoupled=True)
        self._step = OpSlot("adamw", self._by_torch, amsgrad=config.amsgrad, maximize=config.maximize)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """The step."""
        return {"step": self._step}

    def apply(self, batch: Batch) -> None:
        """One call for the whole batch, of any dtypes."""
        self._step(batch, betas=self._config.betas, eps=self._config.eps)

    def _by_torch(self, batch: Batch, *, betas: tuple[float, float], eps: float) -> None:  # noqa: ARG002 - the config's
        super().apply(batch)
