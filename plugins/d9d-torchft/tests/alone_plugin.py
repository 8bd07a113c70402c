"""Single-file plugin with the strategy torchft whose replica is the only one, so that it needs no lighthouse."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from d9d_core.config import PluginConfig
from d9d_core.plugin import Ref, StrategySpec, hookimpl

D9D_API = 2


class AloneConfig(PluginConfig):
    """A replica alone."""

    name: Literal["alone"] = "alone"
    """Selects the strategy."""


class Alone:
    """Strategy of a replica alone."""

    def __init__(self, _config: AloneConfig) -> None: ...

    def apply(self, _stage: Any, topology: Any) -> Any:
        from d9d_core.strategy import Applied, no_collectives
        from d9d_torchft.config import TorchFTConfig
        from d9d_torchft.replicas import TorchFTReplicas

        def coordinator(_settings: Any) -> Any:
            return SimpleNamespace(quorum=lambda member, _seconds, _stops: [member], close=lambda: None)

        token = Path(tempfile.mkdtemp(), "token")
        token.write_text("a secret of this test")
        environ = {
            "D9D_TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1",
            "D9D_TORCHFT_REPLICA": "a",
            "D9D_TORCHFT_TOKEN_FILE": str(token),
        }
        replicas = TorchFTReplicas(TorchFTConfig(), topology, environ, coordinator)
        return Applied(modules=("",), collectives=no_collectives, elastic=replicas)


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """The strategy."""
    yield StrategySpec(
        name="alone",
        summary="Elastic replicas, of which there is one.",
        config=Ref(f"{__name__}:AloneConfig"),
        build=Ref(f"{__name__}:Alone"),
        anchor="data",
        position="after",
    )
