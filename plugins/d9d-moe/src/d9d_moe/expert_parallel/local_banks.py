"""Forward of expert banks on the local shards of their parameters."""

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
    # A bound method: Dynamo guards on the identity of other callables, and would recompile for every block.
    replaced: Callable[..., Any] = LocalBanks(bank, bank.forward).__call__
    bank.forward = replaced


class LocalBanks:
    """Forward of a bank with a rank's local experts.

    It is not a closure, because a deep copy of the module must use its own parameters.

    Args:
        bank: module whose local shards are used.
        forward: original forward of the module.
    """

    def __init__(self, bank: nn.Module, forward: Callable[..., Any]) -> None:
        self.bank = bank
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward with local shards as parameters."""
        # As in FSDP2 and torch.func.functional_call: modules look up their parameters here at each access.
        own: dict[str, Any] = self.bank._parameters  # noqa: SLF001
        spread = {name: parameter for name, parameter in own.items() if isinstance(parameter, DTensor)}
        own.update({name: parameter.to_local() for name, parameter in spread.items()})
        try:
            return self.forward(*args, **kwargs)
        finally:
            own.update(spread)
