"""Forward of a module of stacked expert weights (a bank) on the local shards of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def compute_with_local_banks(bank: nn.Module) -> None:
    """Change a module in place so that its forward uses the local shards ``[local experts, ...]`` of its DTensors.

    The module and its kernels therefore handle no DTensors. The gradient of a local shard is the DTensor's local
    gradient: the tokens of all ranks were sent to the experts, so no gradient is reduced over ``ep``.

    Args:
        bank: module that owns parameters, each sharded over ranks in dimension 0; its children are not changed.
    """
    # A bound method: Dynamo guards on the identity of other callables, and would recompile for every layer.
    replaced: Callable[..., Any] = LocalBanks(bank, bank.forward).__call__
    bank.forward = replaced


class LocalBanks:
    """Callable that replaces the forward of a module of expert weights: it computes with this rank's experts only.

    It is an object, not a closure, because ``copy.deepcopy`` copies the ``bank`` in an object; a closure in a copied
    module would keep using the parameters of the original module.

    Args:
        bank: module whose parameters are replaced by their local shards ``[local experts, ...]`` during the call.
        forward: original forward of the module.
    """

    def __init__(self, bank: nn.Module, forward: Callable[..., Any]) -> None:
        self.bank = bank
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward while the module's parameters are their local shards."""
        # Modules look up their parameters in this dict at each access; FSDP2 and torch.func.functional_call change it,
        # too.
        own: dict[str, Any] = self.bank._parameters  # noqa: SLF001
        spread = {name: parameter for name, parameter in own.items() if isinstance(parameter, DTensor)}
        own.update({name: parameter.to_local() for name, parameter in spread.items()})
        try:
            return self.forward(*args, **kwargs)
        finally:
            own.update(spread)
