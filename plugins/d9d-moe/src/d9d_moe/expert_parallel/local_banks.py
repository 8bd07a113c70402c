"""Experts compute with the part of their banks that this rank holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def compute_with_local_banks(bank: nn.Module) -> None:
    """Let a module's forward see local tensors ``[experts here, ...]`` where its parameters are DTensors. In place.

    So neither the module nor a kernel meets a DTensor. The gradient of a local part is that of the DTensor's: tokens of
    all ranks have come to the experts, and nothing is left to add up over ``ep``.

    Args:
        bank: a module that owns parameters, each split over ranks in dimension 0; children are not changed.
    """
    forward = bank.forward

    @wraps(forward)
    def with_local_banks(*args: Any, **kwargs: Any) -> Any:
        # What FSDP2 and torch.func.functional_call do: modules look their parameters up here at each access.
        own: dict[str, Any] = bank._parameters  # noqa: SLF001
        spread = {name: parameter for name, parameter in own.items() if isinstance(parameter, DTensor)}
        own.update({name: parameter.to_local() for name, parameter in spread.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            own.update(spread)

    replaced: Callable[..., Any] = with_local_banks
    bank.forward = replaced
