"""Recorded modules (CUDA graphs): which layouts allow them, and where a step begins for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from d9d_core.errors import BuildError
from d9d_core.plugin import StrategySpec
from d9d_core.program.placement import Pipeline
from d9d_core.registry.capabilities import Chosen
from d9d_core.strategy import Applied

#: Anchors of strategies that communicate inside of blocks.
_INSIDE = ("tensor", "context", "expert")


def records_graphs(applied: Sequence[tuple[Chosen, Applied]]) -> bool:
    """Whether a strategy records modules as CUDA graphs."""
    return any(outcome.cuda_graphs for _, outcome in applied)


def check_cuda_graphs(applied: Sequence[tuple[Chosen, Applied]], pipeline: Pipeline, device: str | None) -> None:
    """Refuse CUDA graphs of modules where a replay would use other memory than the recording, or write over it.

    A replay repeats the addresses of the recording. So parameters must stay where they are, nothing but the device's
    kernels may run inside of a module, and outputs must be done with when the next step begins. A model that only runs
    forward needs no more than that: nothing is a step of it, so torch keeps what is alive.

    Args:
        applied: each strategy and what it changed.
        pipeline: all stages.
        device: type of the device; ``None`` where it is not known yet.

    Raises:
        BuildError: the job does not allow it; the text says why, and what to do.
    """
    recording = next((chosen for chosen, outcome in applied if outcome.cuda_graphs), None)
    if recording is None:
        return
    reason = _reason(applied, pipeline, device)
    if reason is not None:
        raise BuildError(
            f"{recording.where}: strategy '{recording.spec.name}' is to record CUDA graphs, but {reason}; remove "
            "'cudagraphs: true', and of the modes write 'max-autotune-no-cudagraphs' for 'max-autotune' and 'default' "
            "for 'reduce-overhead'"
        )


def _reason(applied: Sequence[tuple[Chosen, Applied]], pipeline: Pipeline, device: str | None) -> str | None:
    if device not in (None, "cuda"):
        return f"that needs CUDA, and the model is on {device}"
    if len(pipeline.hosts) > 1:
        return (
            f"the model is cut into {len(pipeline.hosts)} pipeline stages: their outputs are sent while later "
            "microbatches run, which would write over them"
        )
    for chosen, outcome in applied:
        if outcome.reducers or any(owner.owner == "fsdp" for owner in outcome.gradients):
            return (
                f"{chosen.where} ({chosen.spec.name}) gathers or copies the parameters of a block into other memory "
                "in each step and frees them after it, and a graph knows one address"
            )
        if outcome.on_host:
            return f"{chosen.where} ({chosen.spec.name}) keeps parameters in the host's memory"
        if isinstance(chosen.spec, StrategySpec) and chosen.spec.anchor in _INSIDE:
            return (
                f"{chosen.where} ({chosen.spec.name}) communicates between ranks inside of blocks, whose rows or waits "
                "differ from step to step"
            )
    return None


def step_mark(applied: Sequence[tuple[Chosen, Applied]]) -> Callable[[], None]:
    """Function to call when a step begins; it does nothing where no module is recorded.

    It says that what graphs returned in the step before is done with. That is once a step, and not once a microbatch:
    gradients of earlier microbatches lie in the graphs' memory until the update, and within a step torch keeps what is
    alive, by a recording for each microbatch of the step.
    """
    if not records_graphs(applied):
        return lambda: None
    # At once: without any mark, torch takes each call of a block for a step of its own.
    mark: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin
    mark()
    return mark
