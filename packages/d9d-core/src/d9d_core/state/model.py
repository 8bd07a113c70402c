"""The tensors of a model that are worth keeping, under one canonical name each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from d9d_core.topology.local import full


def model_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by qualified name; a tied parameter appears once, under its first name."""
    parameters = dict(stage.named_parameters())
    aliases = dict(stage.named_parameters(remove_duplicate=False))
    persistent = stage.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in persistent.items() if name not in aliases}
    return {**parameters, **buffers}


def gathered(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors in the host's memory, one after the other. Collective over the ranks of DTensors' meshes.

    Args:
        tensors: equally named on all ranks.
        keep: whether this rank wants the result; the others return nothing.
    """
    whole = {}
    for name, tensor in tensors.items():
        value = full(tensor)
        if keep:
            whole[name] = value.detach().cpu()
    return whole
