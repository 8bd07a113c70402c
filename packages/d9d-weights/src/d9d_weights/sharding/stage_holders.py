"""Mapping from a model's tensors to the pipeline ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from d9d_core.tensors import full
from d9d_core.types import TensorSpec
from torch import Tensor
from torch import distributed as dist

from d9d_weights.graph.base import raise_if
from d9d_weights.sharding.collectives import all_gather_objects
from d9d_weights.sharding.shards import dtype_name

__all__ = ["StageHolders"]


@dataclass(frozen=True)
class StageHolders:
    """Mapping from the tensors of a model to the pipeline ranks that hold them.

    Attributes:
        specs: shapes and dtypes of the full model's tensors by name, in the same order on all ranks.
        holders: rank in ``group`` that holds a tensor, by its name; one of the ranks if several hold equal copies.
        group: process group along ``pp``, with backends for the CPU and for ``device``.
        device: device for sending and receiving tensors.
    """

    specs: Mapping[str, TensorSpec]
    holders: Mapping[str, int]
    group: dist.ProcessGroup
    device: torch.device

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that this rank holds the tensors that it must send.

        Raises:
            CheckpointError: a tensor of the model has no holder, or this rank lacks a tensor assigned to it or holds it
                with another shape or dtype.
        """
        rank = dist.get_rank(self.group)
        problems = [f"no rank holds '{name}'" for name in self.specs if name not in self.holders]
        for name, holder in self.holders.items():
            if holder == rank and name not in tensors:
                problems.append(f"'{name}' is missing")
            elif holder == rank and _spec(tensors[name]) != self.specs[name]:
                problems.append(f"'{name}' is {_said(_spec(tensors[name]))}, not {_said(self.specs[name])}")
        raise_if(problems, f"the tensors of pipeline rank {rank} differ from those assigned to it:")

    def full(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Send a tensor from its holder and return it in full on every rank.

        Collective over ``group``, and over the mesh of a DTensor.

        Args:
            name: name of the tensor, the same on all ranks.
            tensors: tensors of this rank. The result may share memory with one of them.
        """
        holder, spec = self.holders[name], self.specs[name]
        if dist.get_rank(self.group) == holder:
            gathered = full(tensors[name]).detach().to(self.device).contiguous()
        else:
            gathered = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        if gathered.numel():
            # Broadcast as bytes, because not every backend supports every dtype.
            dist.broadcast(gathered.reshape(-1).view(torch.uint8), group=self.group, group_src=holder)
        return gathered

    def among(self, tensors: Mapping[str, Tensor]) -> StageHolders:
        """Holders of only the tensors that ranks pass, for example of existing gradients. Collective over ``group``.

        Args:
            tensors: tensors of this rank, named as in the model; shapes and dtypes may differ from the model's.

        Raises:
            CheckpointError: the model lacks one of the tensors, or ranks pass different tensors under
                one name; raised on all ranks.
        """
        listed = [[name, [*tensor.shape], dtype_name(tensor.dtype)] for name, tensor in tensors.items()]
        specs: dict[str, TensorSpec] = {}
        holders: dict[str, int] = {}
        problems = []
        for rank, names in enumerate(all_gather_objects(listed, self.group)):
            for name, shape, dtype in names:
                spec = TensorSpec(tuple(shape), getattr(torch, dtype))
                holder = holders.setdefault(name, rank)
                if specs.setdefault(name, spec) != spec:
                    there = f"{_said(specs[name])} on pipeline rank {holder}"
                    problems.append(f"'{name}' is {there}, and {_said(spec)} on {rank}")
                if name not in self.specs:
                    problems.append(f"pipeline rank {rank} holds '{name}', which the model does not have")
        raise_if(problems, "pipeline ranks do not hold tensors of one model:")
        ordered = {name: specs[name] for name in self.specs if name in specs}
        return StageHolders(ordered, holders, self.group, self.device)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _said(spec: TensorSpec) -> str:
    return f"{dtype_name(spec.dtype)} {list(spec.shape)}"
