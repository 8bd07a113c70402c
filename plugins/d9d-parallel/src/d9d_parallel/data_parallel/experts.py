"""Data parallelism of experts that are sharded over ranks: it runs over other ranks than that of the rest."""

from __future__ import annotations

from d9d_core.errors import BuildError
from d9d_core.tensors import local
from d9d_core.topology import Topology
from d9d_core.traits import HasExperts, modules_with
from torch import nn
from torch.distributed.tensor import DTensor, Shard

#: The view of the mesh that spread experts belong to, and its dimensions that data parallelism is over.
VIEW, REPLICAS, SHARDS = "expert", "expert_replicate", "expert_fsdp"


def find_banks(stage: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold experts, by qualified name."""
    layers = modules_with(stage, HasExperts)
    members = {id(bank) for layer in layers.values() for bank in layer.expert_banks().values()}
    return {name: module for name, module in stage.named_modules() if id(module) in members}


def is_spread(bank: nn.Module) -> bool:
    """Whether a bank's parameters are sharded by expert already."""
    return any(isinstance(parameter, DTensor) for parameter in bank.parameters())


class ShardDimension:
    """Shard dimension of a bank of experts ``[experts, ...]`` over data-parallel ranks that hold the same experts.

    Dimension 0, as long as each rank keeps whole experts; else the first other one that the ranks divide. Splitting
    another dimension costs a copy on every gathering, splitting dimension 0 none.

    Args:
        topology: tells how many such ranks there are.
        strategy: name of the strategy, for the error.
    """

    def __init__(self, topology: Topology, strategy: str) -> None:
        self._ranks = topology.grid(VIEW).sizes[SHARDS]
        self._strategy = strategy

    def __call__(self, parameter: nn.Parameter) -> Shard:
        """Placement of a parameter, as FSDP2 asks for it.

        Raises:
            BuildError: no dimension divides.
        """
        shape = local(parameter).shape
        for dimension, size in enumerate(shape):
            if size % self._ranks == 0:
                return Shard(dimension)
        raise BuildError(
            f"strategy '{self._strategy}': experts of shape {[*shape[1:]]}, {shape[0]} of them on each rank of ep, "
            f"cannot be shared by {SHARDS} = {self._ranks} ranks, which divides none of these sizes; raise mesh.ep"
        )
