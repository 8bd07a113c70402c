"""Decay gates of states: the logarithm of the factor by which a token shrinks the state of each head.

Shapes: ``...`` leading dims, N heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LogSigmoidDecay", "MambaDecay", "MambaRates"]


class MambaRates(nn.Module):
    """Parameters of decays: a rate ``-exp(A_log)`` and a bias ``dt_bias`` of the steps for each head.

    Args:
        heads: N.
        rates: smallest and largest initial value of ``exp(A_log)``, drawn uniformly.
        times: smallest and largest initial value of ``softplus(dt_bias)``, drawn uniformly in their logarithm; ``None``
            for biases of one.
    """

    def __init__(
        self, heads: int, *, rates: tuple[float, float] = (0.01, 16.0), times: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self._rates, self._times = rates, times
        MambaRates.reset_parameters(self)  # not self.reset_parameters: a subclass has not created its parameters yet

    def reset_parameters(self) -> None:
        """Draw the initial rates and times."""
        with torch.no_grad():
            self.A_log.uniform_(*self._rates).log_()
            if self._times is None:
                nn.init.ones_(self.dt_bias)
                return
            self.dt_bias.uniform_(*map(math.log, self._times)).exp_()
            # Apply the inverse of softplus to the drawn times.
            self.dt_bias.add_(torch.log(-torch.expm1(-self.dt_bias)))

    def rate(self, x: Tensor) -> Tensor:
        """Rates [N], not positive, in float32, or in the dtype of ``x`` if it is wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        # Rates are kept finite, because an infinite rate times a step of zero would be NaN.
        return -self.A_log.to(wide).clamp(max=math.log(torch.finfo(wide).max) - 1).exp()

    def step(self, x: Tensor) -> Tensor:
        """Step sizes ``softplus(x + dt_bias)`` of ``x`` [..., N]: the same shape, float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return functional.softplus(x.to(wide) + self.dt_bias.to(wide))


class MambaDecay(MambaRates):
    """Decay ``-exp(A_log) * softplus(x + dt_bias)`` (Dao and Gu 2024, "Transformers are SSMs", section 7), in float32.

    Args:
        heads: N.
        rates: smallest and largest initial value of ``exp(A_log)``.
        times: smallest and largest initial value of ``softplus(dt_bias)``; ``None`` for biases of one.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., N] to decays, not positive, float32 or wider [..., N]."""
        return self.rate(x) * self.step(x)


class LogSigmoidDecay(nn.Module):
    """Decay ``logsigmoid(x) / normalizer`` (Yang et al. 2023, "Gated Linear Attention", section 4.3), in float32.

    Args:
        normalizer: divisor; a larger one keeps the state for longer.
    """

    def __init__(self, *, normalizer: float = 16.0) -> None:
        super().__init__()
        self.normalizer = normalizer

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., N] to decays, not positive, float32 or wider [..., N]."""
        return functional.logsigmoid(x.to(torch.promote_types(x.dtype, torch.float32))) / self.normalizer
