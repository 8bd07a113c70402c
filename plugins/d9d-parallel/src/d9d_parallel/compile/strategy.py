"""Strategy ``compile``: equal blocks share one compiled graph, so compile time does not grow with depth."""

from __future__ import annotations

from typing import Any

import torch
from d9d_core.config import closest
from d9d_core.errors import BuildError
from d9d_core.strategy import Applied, no_collectives
from d9d_core.topology import Topology
from torch import nn

from d9d_parallel.activation_checkpointing.recompute import is_checkpointed
from d9d_parallel.blocks import find_blocks
from d9d_parallel.compile.config import CompileConfig


class Compile:
    """Strategy ``compile``: compiles every block in place; compilation happens when a block is first called."""

    def __init__(self, config: CompileConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Mark the blocks for compilation. Module tree and parameter names stay unchanged.

        Raises:
            BuildError: the stage has no blocks, they are compiled already, or the backend is unknown.
        """
        config = self._config
        blocks = find_blocks(stage, config.name)
        if config.backend == "inductor" and topology.device.type == "cuda" and not topology.simulated:
            _start_workers()
        _check_backend(config.backend)
        if done := [name for name, block in blocks.items() if block._compiled_call_impl is not None]:  # noqa: SLF001
            raise BuildError(
                f"strategy '{config.name}' would compile block '{done[0]}' a second time; "
                "keep one 'compile' in 'parallel'"
            )
        if any(map(is_checkpointed, blocks.values())):
            _allow_replaced_parameters()
        how = {"options": _graph_options(config.mode)} if config.records_graphs else {"mode": config.mode}
        for block in blocks.values():
            block.compile(backend=config.backend, fullgraph=config.fullgraph, dynamic=config.dynamic, **how)
        return Applied(modules=tuple(blocks), cuda_graphs=config.records_graphs, collectives=no_collectives)


def _start_workers() -> None:
    """Start the processes in which inductor compiles Triton kernels.

    Starting them takes seconds. Without this call, torch would start them at the first graph, and compile the kernels
    of that graph one after another in this process.
    """
    from torch._inductor.async_compile import maybe_warm_pool  # private; long to import

    maybe_warm_pool()


def _allow_replaced_parameters() -> None:
    """Let Dynamo trace checkpointed forwards with side effects, such as the forwards of tensor parallelism.

    The forwards of tensor parallelism replace parameters by local shards and pass products to layers, and undo these
    changes afterwards. Dynamo refuses side effects in a checkpointed forward unless it may skip them in the
    recomputation; the block would then run uncompiled. In the graph, the recomputation only repeats operators, which
    were traced with the shards.
    """
    # The setting is private and global to the process, because no argument of torch.compile sets it. Setting an unknown
    # name is an error.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # noqa: SLF001


def _graph_options(mode: str | None) -> dict[str, Any]:
    """Options of inductor for CUDA graphs and for a mode together; torch accepts a mode or options, not both."""
    from torch._inductor import list_mode_options  # as torch.compile's documentation says; long to import

    # Make a block that cannot be recorded an error: torch would continue without graphs, at most with a warning.
    return {**list_mode_options(mode or "default"), "triton.cudagraphs": True, "triton.cudagraph_or_error": True}


def _check_backend(name: str) -> None:
    # With an empty tuple of excluded tags, torch also lists its debugging backends.
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        near = closest(name, known)
        hint = f"did you mean '{near}'?" if near else f"torch knows: {', '.join(known)}"
        raise BuildError(f"strategy 'compile': unknown backend '{name}'; {hint}")
