"""Strategy ``torchft``."""

from __future__ import annotations

from d9d_core.strategy import Applied, no_collectives
from d9d_core.topology import Topology
from torch import nn

from d9d_torchft.config import TorchFTConfig
from d9d_torchft.replicas import TorchFTReplicas


class TorchFT:
    """Strategy of elastic replicas, which leaves the stage unchanged."""

    def __init__(self, config: TorchFTConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:  # noqa: ARG002 - the signature of Strategy
        """Declare the elastic replicas; nothing is opened before training."""
        return Applied(
            modules=("",),
            collectives=no_collectives,
            notes=("replicas of the whole run share the microbatches of each step, and sum gradients in every step",),
            elastic=TorchFTReplicas(self._config, topology),
        )
