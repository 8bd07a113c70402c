"""Holders of a model's tensors among pipeline ranks."""

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
    """Holders of the tensors of a model whose stages are split over pipeline ranks.

    Attributes:
        specs: shape and dtype of each tensor of the full model, in an order that all ranks share.
        holders: tensor -> the rank in ``group`` that holds it; of several that hold equal copies, one.
        group: the ranks along ``pp``; needs a backend for the CPU and one for ``device``.
        device: what tensors are sent from and received on.
    """

    specs: Mapping[str, TensorSpec]
    holders: Mapping[str, int]
    group: dist.ProcessGroup
    device: torch.device

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Make sure that this rank can send what the others will wait for.

        Raises:
            CheckpointError: a tensor of the model has no holder, or this rank should hold one and does not.
        """
        rank = dist.get_rank(self.group)
        problems = [f"nobody holds '{name}'" for name in self.specs if name not in self.holders]
        for name, holder in self.holders.items():
            if holder == rank and name not in tensors:
                problems.append(f"'{name}' is not here")
            elif holder == rank and _spec(tensors[name]) != self.specs[name]:
                problems.append(f"'{name}' is {_said(_spec(tensors[name]))} here, and {_said(self.specs[name])} there")
        raise_if(problems, f"what pipeline rank {rank} holds is not what it was said to hold:")

    def full(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Full tensor on every rank. Collective over ``group``, and over the mesh of a DTensor.

        Args:
            name: which one, the same on all ranks.
            tensors: those of this rank. The result may share memory with one of them.
        """
        holder, spec = self.holders[name], self.specs[name]
        if dist.get_rank(self.group) == holder:
            gathered = full(tensors[name]).detach().to(self.device).contiguous()
        else:
            gathered = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        if gathered.numel():
            # As bytes, since not every backend knows every dtype.
            dist.broadcast(gathered.reshape(-1).view(torch.uint8), group=self.group, group_src=holder)
        return gathered

    def among(self, tensors: Mapping[str, Tensor]) -> StageHolders:
        """Holders of the tensors that ranks hold now, such as the gradients there are. Collective over ``group``.

        Args:
            tensors: those of this rank, named as in the model; shapes and dtypes may be others.

        Raises:
            CheckpointError: the model has no tensor of that name, or ranks hold different ones; on all ranks.
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
