"""Optimizers and learning-rate schedules.

Start here: :class:`Optimizer` updates parameters in place where its gate is true; :class:`LrSchedule` is a function of
the step::

    import torch

    class SignSGD:
        def __init__(self, config, parameters):
            self.parameters, self.base, self.factor = parameters, config.lr, 1.0

        def init_state(self): ...
        def set_lr_factor(self, factor): self.factor = factor
        def describe(self): return {"all": {"lr": self.lr}}
        def state(self): return {}

        lr = property(lambda self: self.base * self.factor)

        @torch.no_grad()
        def step(self, gate):
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.sub_(self.lr * parameter.grad.sign() * gate)

Optional: :class:`DividesGradients`, :class:`AveragesWeights`, :class:`DeclaresCollectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from d9d_core.strategy import Collective

__all__ = ["AveragesWeights", "DeclaresCollectives", "DividesGradients", "LrSchedule", "Optimizer"]


class Optimizer(Protocol):
    """Optimizer of parameters in place. Its state is keyed by parameter name, so any layout can resume from any other.

    It is given the trained parameters of the full model, so that its rules mean the same on every rank. Those of other
    pipeline ranks are on the meta device and never have a gradient; the state made for them is there too.

    Parameters and gradients may be DTensors; state made with ``torch.zeros_like`` then is sharded like them. An update
    that is elementwise works on :func:`d9d_core.tensors.local` of each. One that needs more than single elements, such
    as whole matrices, communicates inside of :meth:`step`, over the meshes of its parameters: all ranks of a mesh step
    together and have gradients of the same parameters, so collectives in the parameters' order match.

    What only some optimizers do are protocols of their own: :class:`DividesGradients`, :class:`AveragesWeights`.
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


@runtime_checkable
class DividesGradients(Optimizer, Protocol):
    """Optimizer that clips gradients inside of its step, which saves a pass over them.

    The trainer asks for it where nobody reads gradients between clipping and the step. Results are those of gradients
    that were divided before; the quotients of narrow ones need not be rounded to their dtype.
    """

    def divide_gradients(self, divisor: Tensor) -> None:
        """Divide the gradients of the coming step, and of no later one.

        Args:
            divisor: 0-d float32 on the parameters' device, at least 1; NaN where the step's gate is false.
        """
        ...


@runtime_checkable
class AveragesWeights(Optimizer, Protocol):
    """Optimizer whose trained weights are not those that it takes gradients at."""

    @property
    def average(self) -> tuple[str, float]:
        """Slot s of the state and number w with which the weights to evaluate are ``(1 - w) parameter + w s``.

        So readers of a checkpoint compute them, in the slot's dtype.
        """
        ...

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the parameters hold the weights to evaluate and to export inside the block.

        After it they have their bits again. No step is made inside.
        """
        ...


@runtime_checkable
class DeclaresCollectives(Protocol):
    """Optimizer that says what its step communicates, for ``d9d explain``."""

    def collectives(self) -> Iterable[Collective] | None:
        """Collectives of a step on this rank, if every parameter has a gradient; ``None`` if that is not known."""
        ...


class LrSchedule(Protocol):
    """Learning-rate schedule: the factor on the base rate as a pure function of the step."""

    def __call__(self, step: int) -> float:
        """Factor of step ``step`` (0-based)."""
        ...
