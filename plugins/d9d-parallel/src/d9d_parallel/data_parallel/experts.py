"""Data parallelism of experts that expert parallelism has sharded: over the ranks that hold the same experts."""

from __future__ import annotations

from d9d_core.errors import BuildError
from d9d_core.tensors import local
from d9d_core.topology import Topology
from d9d_core.traits import HasExperts, modules_with
from torch import nn
from torch.distributed.tensor import DTensor, Shard

#: Names of the mesh view for sharded experts, and of its two data-parallel dimensions.
VIEW, REPLICAS, SHARDS = "expert", "expert_replicate", "expert_fsdp"


def find_banks(stage: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold the weights of experts, by qualified name."""
    layers = modules_with(stage, HasExperts)
    members = {id(bank) for layer in layers.values() for bank in layer.expert_banks().values()}
    return {name: module for name, module in stage.named_modules() if id(module) in members}


def is_spread(bank: nn.Module) -> bool:
    """Whether the parameters of a bank (module that holds experts) are already sharded by expert."""
    return any(isinstance(parameter, DTensor) for parameter in bank.parameters())


class ShardDimension:
    """Placement of expert weights ``[experts, ...]`` over data-parallel ranks that hold the same experts.

    Shards the first dimension that the number of ranks divides: dimension 0 if each rank then keeps whole experts. Each
    gather of another dimension needs a copy, a gather of dimension 0 needs none.

    Args:
        topology: topology with the number of data-parallel ranks that hold the same experts.
        strategy: name of the strategy, for error messages.
    """

    def __init__(self, topology: Topology, strategy: str) -> None:
        self._ranks = topology.grid(VIEW).sizes[SHARDS]
        self._strategy = strategy

    def __call__(self, parameter: nn.Parameter) -> Shard:
        """Placement of a parameter; called by FSDP2.

        Raises:
            BuildError: the number of ranks divides no dimension.
        """
        shape = local(parameter).shape
        for dimension, size in enumerate(shape):
            if size % self._ranks == 0:
                return Shard(dimension)
        raise BuildError(
            f"strategy '{self._strategy}': experts of shape {[*shape[1:]]}, {shape[0]} of them on each rank of ep, "
            f"cannot be sharded over {SHARDS} = {self._ranks} ranks, which divides none of these sizes; raise mesh.ep"
        )
