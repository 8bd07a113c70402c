"""Reduce-scatters of FSDP2's units directly from the gradients.

FSDP2 copies the gradients of a unit into one flat buffer, ordered by rank, and reduces the buffer. If parameters are
sharded evenly along dimension 0, the parts of a gradient for each rank are already consecutive in its memory, so the
gradient is reduced from its own memory, in one call for all gradients of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from d9d_engine.compat import settle_fsdp_reduction
from torch import Tensor

from d9d_parallel.data_parallel.direct_gather import DirectGather

# Private attributes of torch, as in direct_gather.py: if one does not exist, FSDP2's own code runs, and
# test_direct_gather.py fails.
_OF_GROUP = (
    "_all_reduce_hook", "_is_hsdp", "_post_reduce_event", "_reduce_scatter_process_group",
    "force_sum_reduction_for_comms", "gradient_divide_factor", "post_backward", "reduce_grads",
)  # fmt: skip


def reduce_directly(gathers: Sequence[DirectGather]) -> None:
    """Make units that gather directly also reduce gradients directly, unless gradients are also summed over replicas.

    Call it before :func:`d9d_engine.compat.prepare_fsdp_gradients`, whose zeros are reduced like other gradients.
    """
    for gather in gathers:
        if all(hasattr(gather.group, name) for name in _OF_GROUP) and not gather.group._is_hsdp:  # noqa: SLF001
            DirectReduce(gather.group)


class DirectReduce:
    """Direct reduction of one FSDP2 unit's gradients; replaces a method of its ``FSDPParamGroup``.

    Args:
        group: parameter group of a unit whose parameters are sharded evenly along dimension 0.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._post_backward = group.post_backward
        group.post_backward = self.post_backward

    def post_backward(self, *unused: Any) -> None:
        """End a backward of the unit: free whole parameters and begin to reduce. Collective over the unit's ranks."""
        group = self._group
        trained = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
        if not trained or not self._is_direct(trained):
            self._post_backward(*unused)
            return
        gradients = [_taken(parameter) for parameter in trained]
        group.reduce_grads = False  # makes FSDP2 free parameters without a reduction
        try:
            self._post_backward(*unused)
        finally:
            group.reduce_grads = True
        self._reduce(trained, gradients)

    def _is_direct(self, trained: Sequence[Any]) -> bool:
        """Whether this backward reduces gradients, by plain sums in the parameters' dtype; the same on all ranks."""
        group = self._group
        plain = group.gradient_divide_factor == 1.0 and group.force_sum_reduction_for_comms
        if not (group.reduce_grads and plain and group._all_reduce_hook is None):  # noqa: SLF001
            return False
        return all(hasattr(parameter, "_unsharded_param") and _is_plain(parameter) for parameter in trained)

    def _reduce(self, parameters: Sequence[Any], gradients: Sequence[Tensor]) -> None:
        group, ranks = self._group, self._group._reduce_scatter_process_group  # noqa: SLF001
        handle, stream = group.device_handle, group.comm_ctx.reduce_scatter_stream
        parts = [grad.new_empty(p.sharded_size) for p, grad in zip(parameters, gradients, strict=True)]
        stream.wait_stream(handle.current_stream())
        with torch.no_grad(), handle.stream(stream):
            for dtype in dict.fromkeys(tensor.dtype for tensor in gradients):
                pairs = [(part, grad) for part, grad in zip(parts, gradients, strict=True) if grad.dtype == dtype]
                work = ranks.reduce_scatter_tensor_coalesced([part for part, _ in pairs], [grad for _, grad in pairs])
                work.wait()  # blocks the stream; on a CPU, the host
            for parameter, part in zip(parameters, parts, strict=True):
                shard = parameter.sharded_param
                if shard.grad is None:
                    shard.grad = parameter.to_sharded_dtensor(part)
                else:
                    shard.grad.to_local().add_(part)
            event = stream.record_event()
        settle_fsdp_reduction(group, [*gradients, *parts], event, stream)


def _is_plain(parameter: Any) -> bool:
    """Whether gradients are computed, summed and stored in the parameter's own format, without hooks on them."""
    shard = parameter.sharded_param
    formats = {parameter.param_dtype, getattr(parameter, "reduce_dtype", None)} - {None} | {shard.grad_dtype}
    return formats <= {shard.dtype} and not getattr(shard, "_post_accumulate_grad_hooks", None)


def _taken(parameter: Any) -> Tensor:
    """Return the gradient of a gathered parameter, or zeros if there is none, and clear it."""
    whole = parameter._unsharded_param  # noqa: SLF001
    if whole.grad is None:
        whole.grad = torch.zeros_like(whole)
    gradient: Tensor = parameter.unsharded_grad_data.contiguous()
    whole.grad = None
    return gradient
