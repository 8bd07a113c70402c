"""CUDA graphs of modules: checks that the layout permits them, and marks the beginning of each step for torch."""

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
    """Whether a strategy captures modules as CUDA graphs."""
    return any(outcome.cuda_graphs for _, outcome in applied)


def check_cuda_graphs(applied: Sequence[tuple[Chosen, Applied]], pipeline: Pipeline, device: str | None) -> None:
    """Refuse CUDA graphs of modules if a replay would use other memory than the capture, or overwrite live memory.

    A replay uses the addresses of the capture. So parameters must keep their addresses, a module must run device
    kernels only, and outputs must no longer be needed when the next step begins. In a model that only runs forward,
    outputs stay valid: a step is marked only once, when the model is built, so torch keeps live tensors.

    Args:
        applied: strategies and their effects.
        pipeline: all stages.
        device: device type; ``None`` if unknown.

    Raises:
        BuildError: the job cannot use CUDA graphs.
    """
    recording = next((chosen for chosen, outcome in applied if outcome.cuda_graphs), None)
    if recording is None:
        return
    reason = _reason(applied, pipeline, device)
    if reason is not None:
        raise BuildError(
            f"{recording.where}: strategy '{recording.spec.name}' is to capture CUDA graphs, but {reason}; remove "
            "'cudagraphs: true', or set mode: 'default' instead of 'reduce-overhead', or "
            "'max-autotune-no-cudagraphs' instead of 'max-autotune'"
        )


def _reason(applied: Sequence[tuple[Chosen, Applied]], pipeline: Pipeline, device: str | None) -> str | None:
    if device not in (None, "cuda"):
        return f"that needs CUDA, and the model is on {device}"
    if len(pipeline.hosts) > 1:
        return (
            f"the model is cut into {len(pipeline.hosts)} pipeline stages: their outputs are sent while later "
            "microbatches run, which would overwrite the outputs"
        )
    for chosen, outcome in applied:
        if outcome.reducers or any(owner.owner == "fsdp" for owner in outcome.gradients):
            return (
                f"{chosen.where} ({chosen.spec.name}) gathers or copies the parameters of a block into other memory "
                "in each step, and frees this memory afterwards, but a graph uses fixed addresses"
            )
        if outcome.on_host:
            return f"{chosen.where} ({chosen.spec.name}) keeps parameters in host memory"
        if isinstance(chosen.spec, StrategySpec) and chosen.spec.anchor in _INSIDE:
            return (
                f"{chosen.where} ({chosen.spec.name}) communicates between ranks inside of blocks, with sizes or "
                "waits that differ from step to step"
            )
    return None


def step_mark(applied: Sequence[tuple[Chosen, Applied]]) -> Callable[[], None]:
    """Function to call at the beginning of a step; it does nothing if no module is captured.

    The mark tells torch that outputs of the previous step's graphs are no longer needed. It is called once a step, not
    once a microbatch: gradients of earlier microbatches stay in the graphs' memory until the update, and within a step
    torch preserves live tensors by capturing one graph for each microbatch.
    """
    if not records_graphs(applied):
        return lambda: None
    # Mark now: without any mark, torch treats each call of a block as a separate step.
    mark: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin
    mark()
    return mark
