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
    """In-place optimizer. Its state is keyed by parameter name, so that a run can resume with another layout.

    An optimizer receives the trained parameters of the full model, so that its rules select the same parameters on
    every rank. Parameters of other pipeline ranks, and their state, are on the meta device and never have gradients.

    Parameters and gradients may be DTensors; state made with ``torch.zeros_like`` is then sharded like its parameter.
    Elementwise updates use :func:`d9d_core.tensors.local` of each tensor. Updates that need more, such as whole
    matrices, communicate inside :meth:`step`, over the meshes of the parameters. All ranks of a mesh call :meth:`step`
    together and have gradients of the same parameters, so collectives issued in the order of the parameters match.

    Features of only some optimizers are separate protocols: :class:`DividesGradients`, :class:`AveragesWeights`,
    :class:`DeclaresCollectives`.
    """

    def init_state(self) -> None:
        """Allocate all state, so that a checkpoint can be loaded into it."""
        ...

    def step(self, gate: Tensor) -> None:
        """Update parameters in place from ``parameter.grad``; parameters without a gradient do not change.

        Args:
            gate: 0-d bool tensor on the parameters' device; where false, parameters and state keep their values.
        """
        ...

    def set_lr_factor(self, factor: float) -> None:
        """Set the factor by which the base learning rate of every group is multiplied in the next steps."""
        ...

    @property
    def lr(self) -> float:
        """Current learning rate of the first group."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Parameter groups, for ``d9d explain``: group -> settings and parameter names."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state: ``"<parameter name>/<slot>"`` -> tensor; a slot is a name such as ``exp_avg``.

        The tensors are not copies, so that a checkpoint can be loaded into them.
        """
        ...


@runtime_checkable
class DividesGradients(Optimizer, Protocol):
    """Optimizer that clips gradients inside its step, which saves a pass over them.

    The trainer lets the optimizer clip if no subscriber reads gradients between clipping and the step. Results equal an
    update with gradients divided in advance, except that quotients of low-precision gradients need not be rounded to
    their dtype.
    """

    def divide_gradients(self, divisor: Tensor) -> None:
        """Divide the gradients of the next step only.

        Args:
            divisor: 0-d float32 on the parameters' device, at least 1; NaN where the step's gate is false.
        """
        ...


@runtime_checkable
class AveragesWeights(Optimizer, Protocol):
    """Optimizer whose weights for evaluation and export, such as an average, differ from the trained parameters."""

    @property
    def average(self) -> tuple[str, float]:
        """Name of the state slot s, and the factor w, of the evaluation weights ``(1 - w) * parameter + w * s``.

        Code that reads a checkpoint computes these weights by this formula, in the slot's dtype.
        """
        ...

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Write the weights for evaluation and export into the parameters inside the block.

        The previous values are restored bit for bit after the block. No step is made inside it.
        """
        ...


@runtime_checkable
class DeclaresCollectives(Protocol):
    """Optimizer that lists the collectives of its step, for ``d9d explain``."""

    def collectives(self) -> Iterable[Collective] | None:
        """Collectives of a step on this rank, if every parameter has a gradient; ``None`` if unknown."""
        ...


class LrSchedule(Protocol):
    """Learning-rate schedule: a pure function from the step to the factor of the base learning rate."""

    def __call__(self, step: int) -> float:
        """Factor of the base learning rate in step ``step`` (0-based)."""
        ...
