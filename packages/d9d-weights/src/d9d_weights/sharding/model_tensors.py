"""Persistent tensors of a model, each under one canonical name."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.tensors import full
from torch import Tensor, nn

from d9d_weights.sharding.stage_holders import StageHolders

__all__ = ["model_tensors"]


def model_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by qualified name; a tied parameter appears under its first name only."""
    parameters = dict(stage.named_parameters())
    aliases = dict(stage.named_parameters(remove_duplicate=False))
    persistent = stage.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in persistent.items() if name not in aliases}
    return {**parameters, **buffers}


def gathered(tensors: Mapping[str, Tensor], keep: bool, stage_holders: StageHolders | None = None) -> dict[str, Tensor]:
    """Gather a model's full tensors into host memory, one after the other.

    Collective over the meshes of DTensors, and over ``stage_holders``.

    Args:
        tensors: the same names on all ranks, or, with ``stage_holders``, on all ranks of a stage.
        keep: whether this rank needs the result; other ranks return an empty mapping.
        stage_holders: for each tensor of the model the rank that holds it, if pipeline ranks hold different tensors;
            every tensor that some rank passes is then gathered, in the model's order.

    Raises:
        CheckpointError: the model of ``stage_holders`` lacks one of the tensors, or ranks pass different tensors.
    """
    gathered_tensors = {}
    there = None if stage_holders is None else stage_holders.among(tensors)
    for name in tensors if there is None else there.specs:
        value = full(tensors[name]) if there is None else there.full(name, tensors)
        if keep:
            gathered_tensors[name] = value.detach().cpu()
    return gathered_tensors
