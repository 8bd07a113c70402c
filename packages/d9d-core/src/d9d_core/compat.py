"""Where torch 2.11 and later releases differ. Nothing else asks for a version."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def reduce_unused_parameters(root: nn.Module) -> None:
    """Have every FSDP2 unit under ``root`` count a missing gradient as zeros.

    FSDP2 reduces the gradients that exist on a rank. If a parameter has one on some ranks only, ranks would reduce
    buffers of different sizes: wrong sums or a hang.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        if hasattr(unit, "set_reduce_scatter_unused_params"):  # newer than 2.11
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            continue
        group = unit._get_fsdp_state()._fsdp_param_group  # noqa: SLF001 - 2.11 has no public way
        if group is not None:
            hook = partial(_post_backward_with_zeros, group, group.post_backward)
            group.post_backward = hook  # type: ignore[method-assign]


def _post_backward_with_zeros(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    for parameter in group.fsdp_params if group.reduce_grads else ():
        # A unit that never ran a forward has no whole parameters yet, on any rank.
        if not hasattr(parameter, "_unsharded_param") or not parameter.sharded_param.requires_grad:
            continue
        if parameter.unsharded_accumulated_grad is None and parameter.unsharded_param.grad is None:
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
    post_backward(*unused)
