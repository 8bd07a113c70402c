"""The tensors of a model that are worth keeping, under one canonical name each."""

from __future__ import annotations

from torch import Tensor, nn


def model_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by qualified name; a tied parameter appears once, under its first name."""
    parameters = dict(stage.named_parameters())
    aliases = dict(stage.named_parameters(remove_duplicate=False))
    persistent = stage.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in persistent.items() if name not in aliases}
    return {**parameters, **buffers}
