"""Strategy ``host_activations``: offloads tensors that blocks save for the backward to host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import Applied, no_collectives
from d9d_core.topology import Topology
from d9d_core.traits import HasBlocks, modules_with
from torch import nn

from acme_tuning.config import HostActivationsConfig


class HostActivations:
    """Strategy that saves the activations of each block on the CPU. Results do not change, bit for bit."""

    def __init__(self, config: HostActivationsConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:  # noqa: ARG002 - no mesh needed
        """Wrap the forwards of the blocks; the module tree and parameter names do not change.

        Raises:
            BuildError: the stage has no blocks.
        """
        blocks = {
            id(block): (f"{owner}.{name}".lstrip("."), block)
            for owner, module in modules_with(stage, HasBlocks).items()
            for name, block in module.blocks().items()
        }
        if not blocks:
            raise BuildError("strategy 'host_activations' found no blocks: the model lacks the trait HasBlocks")
        for _, block in blocks.values():
            block.forward = partial(_on_host, block.forward, self._config.pin_memory)
        return Applied(modules=tuple(name for name, _ in blocks.values()), collectives=no_collectives)


def _on_host(forward: Callable[..., Any], pin_memory: bool, *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        return forward(*args, **kwargs)
