"""Strategy ``compile``: alike blocks share one compiled graph, so its time does not grow with the depth."""

from __future__ import annotations

import torch
from d9d_core.extend import Applied, BuildError, Topology, closest
from torch import nn

from d9d_parallel.blocks import find_blocks
from d9d_parallel.compile.config import CompileConfig


class Compile:
    """Strategy that compiles every block in place; compilation happens when a block is first called."""

    def __init__(self, config: CompileConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:  # noqa: ARG002 - needs no mesh
        """Mark the blocks for compilation. Module tree and parameter names stay what they are.

        Raises:
            BuildError: the stage has no blocks, they are compiled already, or torch knows no such backend.
        """
        config = self._config
        blocks = find_blocks(stage, config.name)
        _check_backend(config.backend)
        if done := [name for name, block in blocks.items() if block._compiled_call_impl is not None]:  # noqa: SLF001
            raise BuildError(
                f"strategy '{config.name}' would compile block '{done[0]}' a second time; "
                "keep one 'compile' in 'parallel'"
            )
        for block in blocks.values():
            block.compile(backend=config.backend, mode=config.mode, fullgraph=config.fullgraph, dynamic=config.dynamic)
        return Applied(modules=tuple(blocks))


def _check_backend(name: str) -> None:
    # An empty tuple of excluded tags includes the debugging backends.
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        near = closest(name, known)
        hint = f"did you mean '{near}'?" if near else f"torch knows: {', '.join(known)}"
        raise BuildError(f"strategy 'compile': unknown backend '{name}'; {hint}")
