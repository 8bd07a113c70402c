"""Optimizers and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Optimizer(Protocol):
    """Optimizer of parameters in place. Its state is keyed by parameter name, so any layout can resume from any other.

    It is given the trained parameters of the full model, so that its rules mean the same on every rank. Those of other
    pipeline ranks are on the meta device and never have a gradient; the state made for them is there too.

    Parameters and gradients may be DTensors; state made with ``torch.zeros_like`` then is sharded like them. An update
    that is elementwise works on :func:`d9d_core.tensors.local` of each.
    """

    def init_state(self) -> None:
        """Materialise all state, so that it can be loaded into."""
        ...

    def step(self, gate: Tensor) -> None:
        """Update the parameters from ``parameter.grad``. One without a gradient is left alone.

        Args:
            gate: 0-d bool tensor on the parameters' device; where it is false, neither parameters nor state change.
        """
        ...

    def set_lr_factor(self, factor: float) -> None:
        """Multiply the base learning rate of every group for the coming steps."""
        ...

    @property
    def lr(self) -> float:
        """Present learning rate of the first group."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Parameter groups in words, for ``d9d explain``: group -> settings and parameter names."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state, ``"<parameter name>/<slot>"`` -> tensor. They are its own: loading copies into them."""
        ...


class LrSchedule(Protocol):
    """Learning-rate schedule: the factor on the base rate as a pure function of the step."""

    def __call__(self, step: int) -> float:
        """Factor of step ``step`` (0-based)."""
        ...
