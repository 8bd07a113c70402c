"""Config of the strategy ``torchft``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import PositiveFloat, PositiveInt


class TorchFTConfig(PluginConfig):
    """Elastic replicas: several runs of this job share the microbatches of each step, and may come and go."""

    name: Literal["torchft"] = "torchft"
    """Selects the plugin."""
    min_replicas: PositiveInt = 1
    """Smallest number of replicas that train; if fewer are alive, they wait."""
    timeout: PositiveFloat = 120.0
    """Seconds after which a replica that does not answer in a reduction or a transfer of state counts as lost. Must be
    longer than the longest step, including the compilation in a new replica's first step."""
    quorum_timeout: PositiveFloat = 600.0
    """Seconds to wait for the lighthouse, and for ``min_replicas`` replicas, before the run fails."""
    interface: str | None = None
    """Network interface on which a replica listens, such as ``eth0``; by default, the loopback of one machine."""
