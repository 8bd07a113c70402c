"""Compatibility with torch 2.11 and later releases. Nothing else asks for a version."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import wrap  # nothing public tells
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "keep_fsdp_gradients", "prepare_fsdp_gradients", "recomputes_inside_functions", "reduce_fsdp_gradients",
    "settle_fsdp_reduction",
]  # fmt: skip


def prepare_fsdp_gradients(root: nn.Module) -> None:
    """Make every FSDP2 unit under ``root`` count a missing gradient as zeros, and accumulate in ``Tensor.grad_dtype``.

    FSDP2 reduces the gradients that exist on a rank. If a parameter has one on some ranks only, ranks would reduce
    buffers of different sizes: wrong sums or a hang.
    """
    for unit in [module for module in root.modules() if isinstance(module, FSDPModule)]:
        if hasattr(unit, "set_reduce_scatter_unused_params"):  # newer than 2.11; `grad_dtype` needs nothing there
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            continue
        _patch_fsdp_group(unit._get_fsdp_state()._fsdp_param_group)  # noqa: SLF001 - 2.11 has no public way


def keep_fsdp_gradients(root: FSDPModule) -> None:
    """Accumulate gradients that came outside of FSDP2's backward in its format for that, in every unit under ``root``.

    To be called when some came, before others come.
    """
    for group in _fsdp_groups(root):
        for parameter in group.fsdp_params:
            # Newer than 2.11: full parameters say themselves in which format autograd adds up.
            if hasattr(parameter, "to_accumulated_grad_if_needed") and hasattr(parameter, "_unsharded_param"):
                # What the end of a backward does in 2.11, `FSDPParamGroup.post_backward` without reduction.
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def reduce_fsdp_gradients(root: FSDPModule) -> None:
    """Reduce-scatter what FSDP2 has accumulated in all units under ``root``, and wait, as after a last backward.

    There is no public way: FSDP2 reduces at the end of a backward only, or from torch 2.14 on by `finalize_backward`,
    which must be decided on before any backward of the step. Collective over the ranks of all units.
    """
    state = root._get_fsdp_state()  # noqa: SLF001
    shared = state._state_ctx  # noqa: SLF001 - what the units share
    if hasattr(shared, "manual_backward_finalization_active"):  # newer than 2.11: which way the step ends
        shared.manual_backward_finalization_active = False
    with torch.no_grad():
        # What autograd calls when a backward has ended: it runs `post_backward` of all units that did not.
        state._root_post_backward_final_callback()  # noqa: SLF001


def settle_fsdp_reduction(group: Any, kept: Any, event: torch.Event | None, stream: Any) -> None:
    """Compatibility with an ``FSDPParamGroup``: have FSDP2 treat a reduction that was made in its place as its own.

    The next reduction and the end of the backward wait for it. It waits for the one before, whose tensors are let go.

    Args:
        group: whose gradients are reduced.
        kept: tensors that must live until then.
        event: recorded behind the reduction.
        stream: that runs it.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    state: Any = _fsdp_param_group.ReduceScatterState  # of two fields, later of four
    shared, current = group.comm_ctx, group.device_handle.current_stream()
    group._post_reduce_event = event  # noqa: SLF001
    if hasattr(shared, "reduce_scatter_states"):  # newer than 2.11: a list, and events by stream
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
    """Whether a checkpointed region in a graph computes again what autograd Functions inside of it return.

    Torch 2.11 keeps that, unless it is told by a policy about every operator, as later releases do by themselves.
    """
    return hasattr(wrap, "_always_prefer_recompute")


def _fsdp_groups(root: FSDPModule) -> list[Any]:
    """Parameter groups of the FSDP2 units under ``root``; a unit without parameters of its own has none."""
    assert isinstance(root, nn.Module)
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]  # noqa: SLF001
    return [group for group in groups if group is not None]


# What follows uses private parts of torch 2.11. Where they do not fit, test_partly_used.py of d9d-parallel fails.


def _patch_fsdp_group(group: Any) -> None:
    if group is not None:  # a unit without parameters of its own has none
        group._init_mp_dtypes = partial(_with_grad_dtype, group, group._init_mp_dtypes)  # noqa: SLF001
        group.post_backward = partial(_with_zeros, group, group.post_backward)


def _with_grad_dtype(group: Any, init_mp_dtypes: Callable[[], None]) -> None:
    init_mp_dtypes()
    for parameter in group.fsdp_params:
        wide = parameter.sharded_param.grad_dtype
        if parameter.sharded_param.requires_grad and wide != parameter.orig_dtype:
            parameter.reduce_dtype = wide  # of microbatches that wait
            group._reduce_dtype = group.mp_policy.reduce_dtype or wide  # noqa: SLF001
            group._orig_dtype = wide  # of what is reduced  # noqa: SLF001


def _with_zeros(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    # A unit that never ran a forward has no full parameters yet, on any rank.
    if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
        return
    if group.reduce_grads:
        # What waited is in the format of the reduction, and one reduction takes one format.
        waited = any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params)
        for parameter in group.fsdp_params:
            if not parameter.sharded_param.requires_grad or parameter.unsharded_accumulated_grad is not None:
                continue
            if parameter.unsharded_param.grad is None:
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
            if waited:
                parameter.to_accumulated_grad_if_needed()
    post_backward(*unused)
