"""Who makes gradients final, and how they are clipped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Gradients:
    """Owns the gradients of the trained parameters between backward and optimizer.

    With one process there is nothing to reduce. A parameter that took no part in a step counts as having a zero
    gradient, so that a step means the same in every layout.

    Args:
        parameters: the trained parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._open: set[int] = {0}

    def reduce(self, stage: int) -> None:
        """All backwards of a stage were issued."""
        self._open.discard(stage)

    def finish(self) -> None:
        """Make all gradients final.

        Raises:
            RuntimeError: the step's program never declared a stage complete.
        """
        if self._open:
            raise RuntimeError(f"the program ended without reducing the gradients of stage(s) {sorted(self._open)}")
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def reset(self) -> None:
        """Drop all gradients; their memory is reused by the next step."""
        for parameter in self._parameters:
            parameter.grad = None
        self._open = {0}


class Clipper:
    """Measures the global gradient norm and scales gradients down to ``max_norm``.

    Args:
        parameters: the trained parameters.
        max_norm: ``None`` measures only.
        p: which norm.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], max_norm: float | None, p: float) -> None:
        self._parameters = tuple(parameters)
        self._max_norm = max_norm
        self._p = p

    def clip(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """The norm before clipping, and whether it and the loss are finite; both 0-d on the device.

        Gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))``.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        # torch's get_total_norm would round each tensor's norm to the gradients' dtype. Private, so a test pins it.
        norms = torch._foreach_norm(gradients, self._p, dtype=torch.float32)  # noqa: SLF001
        norm = torch.linalg.vector_norm(torch.stack(norms), self._p)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        if self._max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_norm, norm)
        return norm, finite
