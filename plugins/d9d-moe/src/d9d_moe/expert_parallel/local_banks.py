"""Forward of expert banks on the local shards of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def compute_with_local_banks(bank: nn.Module) -> None:
    """Let a module's forward see local shards ``[experts here, ...]`` of its DTensors. In place.

    So neither the module nor a kernel meets a DTensor. The gradient of a local part is that of the DTensor's: tokens of
    all ranks have come to the experts, and nothing is left to add up over ``ep``.

    Args:
        bank: a module that owns parameters, each split over ranks in dimension 0; children are not changed.
    """
    # Bound: Dynamo guards on which callable object an attribute is, and would compile every block anew.
    replaced: Callable[..., Any] = LocalBanks(bank, bank.forward).__call__
    bank.forward = replaced


class LocalBanks:
    """Forward of a bank over a rank's local experts. No closure: deep copies must compute with their own parameters.

    Args:
        bank: the module.
        forward: its forward until now.
    """

    def __init__(self, bank: nn.Module, forward: Callable[..., Any]) -> None:
        self.bank = bank
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward with local shards as parameters."""
        # What FSDP2 and torch.func.functional_call do: modules look their parameters up here at each access.
        own: dict[str, Any] = self.bank._parameters  # noqa: SLF001
        spread = {name: parameter for name, parameter in own.items() if isinstance(parameter, DTensor)}
        own.update({name: parameter.to_local() for name, parameter in spread.items()})
        try:
            return self.forward(*args, **kwargs)
        finally:
            own.update(spread)
