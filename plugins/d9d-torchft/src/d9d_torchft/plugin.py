"""Declaration of the strategy and of the commands."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, StrategySpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """Declare the strategy ``torchft``, which a job selects in ``parallel``."""
    yield StrategySpec(
        name="torchft",
        summary="Elastic replicas: several runs share the microbatches of each step, and may come and go.",
        config=Ref("d9d_torchft.config:TorchFTConfig"),
        build=Ref("d9d_torchft.strategy:TorchFT"),
        conflicts=frozenset({"mesh:pp", "strategy:local_sgd", "strategy:diloco"}),
        anchor="data",
        position="after",
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the commands ``d9d torchft run`` and ``d9d torchft lighthouse``."""
    yield CommandSpec(
        group="torchft",
        name="run",
        summary="Train with several replicas on this machine, and restart replicas that die.",
        app=Ref("d9d_torchft.commands.run:app"),
    )
    yield CommandSpec(
        group="torchft",
        name="lighthouse",
        summary="Serve the lighthouse, at which the replicas of a job meet.",
        app=Ref("d9d_torchft.commands.lighthouse:app"),
    )
