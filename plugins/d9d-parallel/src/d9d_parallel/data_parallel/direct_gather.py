"""All-gathers of FSDP2's units directly into the parameters.

FSDP2 gathers a unit in one flat buffer: it copies shards into the buffer before the all-gather, and whole parameters
out of it afterwards. A parameter that is sharded evenly along dimension 0 needs neither copy, because the concatenated
shards of all ranks are the parameter. So each parameter is gathered separately, from its shard into its own memory;
NCCL launches the gathers of a unit together.

The parameters' memory is allocated on the compute stream and may still be in use there, so a gather begins after all
work launched before it. In a forward, FSDP2 launches the gathers of a block when the host reaches it; to overlap with
computation, each block must therefore be prefetched during the block before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# Private attributes of torch that this module uses; none are public. If one does not exist, FSDP2's own code runs, and
# test_direct_gather.py fails.
_OF_GROUP = (
    "_all_gather_process_group", "_all_gather_result", "_to_unsharded", "_training_state", "comm_ctx", "device",
    "device_handle", "finalize_backward", "fsdp_params", "is_sharded", "modules", "unshard", "unshard_in_backward",
    "wait_for_unshard",
)  # fmt: skip
_OF_PARAMETER = (
    "_orig_size", "_sharded_local_tensor", "_sharded_param_data", "alloc_all_gather_outputs", "all_gather_outputs",
    "fsdp_placement", "free_unsharded_param", "init_all_gather_outputs", "init_unsharded_param", "offload_to_cpu",
    "padded_sharded_param_size",
)  # fmt: skip


def gather_directly(units: Iterable[FSDPModule]) -> list[DirectGather]:
    """Make FSDP2 units gather directly into their parameters, where possible.

    Units stay unchanged if a parameter is sharded along another dimension or unevenly, is offloaded to host memory, or
    has its own gathering hooks, such as 8-bit parameters.

    Returns:
        The units that gather directly.
    """
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]  # noqa: SLF001
    return [DirectGather(group) for group in groups if group is not None and _fits(group)]


def _fits(group: Any) -> bool:
    if not all(hasattr(group, name) for name in _OF_GROUP):
        return False
    ranks = group._all_gather_process_group.size()  # noqa: SLF001
    return all(_is_direct(parameter, ranks) for parameter in group.fsdp_params)


def _is_direct(parameter: Any, ranks: int) -> bool:
    if not all(hasattr(parameter, name) for name in _OF_PARAMETER):
        return False
    # Compare with the padded size, which is the same on all ranks, because all ranks must decide alike.
    whole, part = parameter._orig_size, parameter.padded_sharded_param_size  # noqa: SLF001
    even = whole.numel() > 0 and whole[0] == ranks * part[0]
    extended = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")  # noqa: SLF001
    return parameter.fsdp_placement.dim == 0 and even and not parameter.offload_to_cpu and not extended


class _Begun(NamedTuple):
    """All-gather in progress; has the attributes of FSDP2's own result, which FSDP2 reads if no code has waited for it.

    Attributes:
        all_gather_event: event recorded after the gather.
        inputs: shards that are gathered, kept until the wait.
        copies: stream on which inputs are cast to another dtype; it owns the memory of the cast inputs.
        all_gather_work: ``None``: there is no further work to wait for.
    """

    all_gather_event: torch.Event | None
    inputs: Sequence[Tensor]
    copies: Any
    all_gather_work: None = None


class DirectGather:
    """Direct all-gather of one FSDP2 unit; replaces methods of its ``FSDPParamGroup``.

    Attributes:
        group: parameter group of the unit.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._unshard, self._wait, self._finalize = group.unshard, group.wait_for_unshard, group.finalize_backward
        #: Gather in progress, which is also the group's ``_all_gather_result``.
        self._begun: _Begun | None = None
        group.unshard, group.wait_for_unshard, group.finalize_backward = self.unshard, self.wait, self.finalize

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather, if the parameters are sharded. Collective over the unit's ranks.

        Args:
            async_op: passed to FSDP2's own gather where that is used; a direct gather never blocks the host on a GPU.
        """
        group = self.group
        in_backward = group._training_state.name == "PRE_BACKWARD"  # noqa: SLF001
        if (
            group._all_gather_result is not None  # noqa: SLF001 - in progress
            or not group.is_sharded  # or resharded to some of the ranks after the forward
            or group._all_gather_process_group.size() == 1  # noqa: SLF001
            or (in_backward and not group.unshard_in_backward)
        ):
            self._unshard(async_op)
            return
        self._begun = group._all_gather_result = self._begin()  # noqa: SLF001

    def wait(self) -> None:
        """Make the current stream wait for the gather, and replace shards by whole parameters."""
        group = self.group
        if self._begun is None or group._all_gather_result is not self._begun:  # noqa: SLF001
            self._wait()
            return
        self._land(self._begun)
        for parameter in group.fsdp_params:
            parameter.init_unsharded_param()
        group._to_unsharded()  # noqa: SLF001

    def finalize(self) -> None:
        """Drop an unused gather at the end of a step's last backward, because the optimizer changes parameters next."""
        self.drop()
        self._finalize()

    def drop(self) -> None:
        """Free parameters that were prefetched but not used, because their block did not run."""
        if self._begun is None or self.group._all_gather_result is not self._begun:  # noqa: SLF001
            return
        self._land(self._begun)
        for parameter in self.group.fsdp_params:
            parameter.free_unsharded_param()

    def _land(self, begun: _Begun) -> None:
        self.group.device_handle.current_stream().wait_event(begun.all_gather_event)
        begun.copies.wait_event(begun.all_gather_event)  # the next unit may reuse the memory of the cast inputs
        self._begun = self.group._all_gather_result = None  # noqa: SLF001

    def _begin(self) -> _Begun:
        group, ranks = self.group, self.group._all_gather_process_group  # noqa: SLF001
        shared, handle = group.comm_ctx, group.device_handle
        copies, gathers = shared.get_all_gather_streams(False, group._training_state)  # noqa: SLF001
        for parameter in group.fsdp_params:
            shard = parameter._sharded_param_data  # noqa: SLF001
            dtype = parameter.param_dtype or shard.dtype
            parameter.init_all_gather_outputs([shard.numel()], [dtype], ranks.size(), group.device)
            parameter.alloc_all_gather_outputs()
        current = handle.current_stream()
        for stream in (copies, gathers):
            stream.wait_stream(current)
        if copies != current:  # free the buffer of a unit that FSDP2 gathered earlier; it is copied by now
            shared.all_gather_state = None
        with torch.no_grad(), handle.stream(copies):  # casts the shards; no work if the dtypes are equal
            inputs = [parameter.all_gather_inputs[0] for parameter in group.fsdp_params]
        gathers.wait_stream(copies)
        # .data avoids autograd's version counter: the gather writes the same values that the forward has saved.
        outputs = [parameter.all_gather_outputs[0].data for parameter in group.fsdp_params]
        with handle.stream(gathers):
            for dtype in dict.fromkeys(tensor.dtype for tensor in outputs):
                pairs = [(out, own) for out, own in zip(outputs, inputs, strict=True) if out.dtype == dtype]
                work = ranks.allgather_into_tensor_coalesced([o for o, _ in pairs], [i for _, i in pairs])
                work.wait()  # blocks the stream; on a CPU, the host
            return _Begun(gathers.record_event(), inputs, copies)
