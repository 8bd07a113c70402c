"""Compatibility with torch 2.11 and later releases: the only module that depends on the version of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import wrap  # no public attribute shows the behaviour
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "keep_fsdp_gradients", "prepare_fsdp_gradients", "recomputes_inside_functions", "reduce_fsdp_gradients",
    "settle_fsdp_reduction",
]  # fmt: skip


def prepare_fsdp_gradients(root: nn.Module, *, recurse: bool = True) -> None:
    """Make every FSDP2 unit under ``root`` count a missing gradient as zeros, and accumulate in ``Tensor.grad_dtype``.

    FSDP2 reduces the gradients that exist on a rank. If a parameter has a gradient on some ranks only, ranks would
    reduce buffers of different sizes: wrong sums or a hang. Call this function once for each unit.

    Args:
        root: module with units; may be a unit.
        recurse: whether to prepare the units inside ``root`` too.
    """
    modules = root.modules() if recurse else [root]
    for unit in [module for module in modules if isinstance(module, FSDPModule)]:
        if hasattr(unit, "set_reduce_scatter_unused_params"):  # newer than 2.11, where FSDP2 respects `grad_dtype`
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            continue
        _patch_fsdp_group(unit._get_fsdp_state()._fsdp_param_group)  # noqa: SLF001 - 2.11 has no public API


def keep_fsdp_gradients(root: FSDPModule) -> None:
    """Add up gradients that were computed outside of FSDP2's backward, in every unit under ``root``.

    The gradients are accumulated in the dtype that FSDP2 uses for unsharded gradients. Call this function each time
    after gradients were computed outside of FSDP2's backward, before the next gradients are computed.
    """
    for group in _fsdp_groups(root):
        for parameter in group.fsdp_params:
            # Releases after 2.11 lack this method: autograd itself accumulates in the unsharded parameter's
            # `grad_dtype`.
            if hasattr(parameter, "to_accumulated_grad_if_needed") and hasattr(parameter, "_unsharded_param"):
                # In 2.11, do the same as `FSDPParamGroup.post_backward` does without reduction.
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def reduce_fsdp_gradients(root: FSDPModule) -> None:
    """Reduce-scatter the gradients that FSDP2 has accumulated in all units under ``root``, and wait for the result.

    FSDP2 has no public API for this: it reduces at the end of a backward, or, from torch 2.14 on, in
    `finalize_backward`, which must be chosen before the first backward of the step. Collective over the ranks of all
    units.
    """
    state = root._get_fsdp_state()  # noqa: SLF001
    shared = state._state_ctx  # noqa: SLF001 - state shared by all units
    if hasattr(shared, "manual_backward_finalization_active"):  # newer than 2.11: reduce at the end of the backward
        shared.manual_backward_finalization_active = False
    with torch.no_grad():
        # Call what autograd calls at the end of a backward: it runs the pending `post_backward` of all units.
        state._root_post_backward_final_callback()  # noqa: SLF001


def settle_fsdp_reduction(group: Any, kept: Any, event: torch.Event | None, stream: Any) -> None:
    """Tell an ``FSDPParamGroup`` that a reduce-scatter runs in place of FSDP2's own.

    FSDP2 then waits for this reduce-scatter before FSDP2's next reduction and at the end of the backward. The current
    stream waits for the previous reduction, whose tensors are released.

    Args:
        group: the ``FSDPParamGroup`` whose gradients are reduced.
        kept: tensors that must stay alive until the reduction has finished.
        event: event recorded after the reduction.
        stream: stream that runs the reduction.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    state: Any = _fsdp_param_group.ReduceScatterState  # has two fields in 2.11, four in later releases
    shared, current = group.comm_ctx, group.device_handle.current_stream()
    group._post_reduce_event = event  # noqa: SLF001
    if hasattr(shared, "reduce_scatter_states"):  # newer than 2.11: a list of states, and events by stream
        group._post_backward_pending = False  # noqa: SLF001
        for before in shared.reduce_scatter_states:
            current.wait_event(before.event)
        shared.reduce_scatter_states[:] = [state(kept, event, current, group)]
        shared._last_post_reduce_events[stream] = event  # noqa: SLF001
        return
    if shared.reduce_scatter_state is not None:
        current.wait_event(shared.reduce_scatter_state.event)
    shared.reduce_scatter_state = state(kept, event)


def recomputes_inside_functions() -> bool:
    """Whether activation checkpointing in a compiled graph recomputes the outputs of autograd Functions.

    Torch 2.11 keeps these outputs unless a policy names every operator; later releases recompute them by default.
    """
    return hasattr(wrap, "_always_prefer_recompute")


def _fsdp_groups(root: FSDPModule) -> list[Any]:
    """FSDP2 parameter groups of the units under ``root``, without units that have no parameters of their own."""
    assert isinstance(root, nn.Module)
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]  # noqa: SLF001
    return [group for group in groups if group is not None]


# The functions below use private parts of torch 2.11. If torch changes them, test_partly_used.py of d9d-parallel fails.


def _patch_fsdp_group(group: Any) -> None:
    if group is not None:  # a unit without parameters of its own has none
        group._init_mp_dtypes = partial(_with_grad_dtype, group, group._init_mp_dtypes)  # noqa: SLF001
        group.post_backward = partial(_with_zeros, group, group.post_backward)


def _with_grad_dtype(group: Any, init_mp_dtypes: Callable[[], None]) -> None:
    init_mp_dtypes()
    for parameter in group.fsdp_params:
        wide = parameter.sharded_param.grad_dtype
        if parameter.sharded_param.requires_grad and wide != parameter.orig_dtype:
            parameter.reduce_dtype = wide  # dtype in which unsharded gradients accumulate over microbatches
            group._reduce_dtype = group.mp_policy.reduce_dtype or wide  # noqa: SLF001
            group._orig_dtype = wide  # dtype of the reduced gradients  # noqa: SLF001


def _with_zeros(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    # A unit that never ran a forward has no unsharded parameters yet, on all ranks alike.
    if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
        return
    if group.reduce_grads:
        # Accumulated gradients have the dtype of the reduction, and one reduction takes a single dtype.
        waited = any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params)
        for parameter in group.fsdp_params:
            if not parameter.sharded_param.requires_grad or parameter.unsharded_accumulated_grad is not None:
                continue
            if parameter.unsharded_param.grad is None:
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
            if waited:
                parameter.to_accumulated_grad_if_needed()
    post_backward(*unused)
