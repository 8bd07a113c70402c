"""Strategy ``deepep``: DeepEP instead of all-to-all, for experts that ``expert_parallel`` has sharded."""

from __future__ import annotations

from functools import partial

from d9d_core.strategy import Applied
from d9d_core.topology import Topology
from d9d_moe.expert_parallel.dispatchers import experts_of, replace_dispatchers, spread_layers
from torch import nn

from d9d_deepep.communication import DeepEPCommunication
from d9d_deepep.config import DeepEPConfig
from d9d_deepep.dispatcher import DeepEPDispatcher


class DeepEP:
    """Strategy ``deepep``: replaces the dispatchers of layers whose experts are sharded by DeepEP dispatchers.

    Layers with equally many experts share a dispatcher.
    """

    def __init__(self, config: DeepEPConfig) -> None:
        """Ignore the config, which has no fields."""

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Replace the dispatchers; does not open a buffer yet. Collective over all ranks.

        Raises:
            BuildError: ``ep`` does not divide the number of experts.
        """
        group = topology.group("expert", "ep")
        assert group is not None  # expert_parallel is applied first, and requires the group
        layers = spread_layers(stage)
        communication = DeepEPCommunication(
            stage,
            layers,
            {name: experts_of(layer) for name, layer in layers.items()},
            topology.grid("expert").group(topology.rank, ["ep"]),
            topology.sizes["tp"],
        )
        modules = replace_dispatchers(stage, partial(DeepEPDispatcher, group), layers)
        return Applied(modules=modules, outside_graph=modules, collectives=communication)
