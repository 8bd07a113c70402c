"""All-gathers of FSDP2's units straight into the parameters.

FSDP2 gathers a unit in one flat buffer: shards are copied into it before the all-gather, and whole parameters out of it
after. A parameter that is split evenly along dimension 0 needs neither, because the shards of all ranks in a row are
the parameter. So each is gathered by itself, from its shard into its own memory; NCCL launches those of a unit at once.

That memory belongs to the stream that computes, and may be in use until there: a gather begins after what was launched
before it. FSDP2 launches the gathers of a forward when the host gets to each block, so blocks have to be requested one
ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# Everything about a unit's parameters is private in torch. Where the names do not fit, FSDP2 goes its own way, and
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


def gather_directly(root: nn.Module) -> list[DirectGather]:
    """Let the FSDP2 units under a module gather straight into their parameters, where nothing stands against it.

    Against it stand a parameter that is split along another dimension or unevenly, that is kept in the host's memory,
    or that has a way of its own to be gathered, such as one in 8 bits: the units of those stay as they are.

    Returns:
        Those that do.
    """
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in root.modules() if isinstance(unit, FSDPModule)]  # noqa: SLF001
    return [DirectGather(group) for group in groups if group is not None and _fits(group)]


def _fits(group: Any) -> bool:
    if not all(hasattr(group, name) for name in _OF_GROUP):
        return False
    ranks = group._all_gather_process_group.size()  # noqa: SLF001
    return all(_is_direct(parameter, ranks) for parameter in group.fsdp_params)


def _is_direct(parameter: Any, ranks: int) -> bool:
    if not all(hasattr(parameter, name) for name in _OF_PARAMETER):
        return False
    # By the padded size, which all ranks have: they must agree.
    whole, part = parameter._orig_size, parameter.padded_sharded_param_size  # noqa: SLF001
    even = whole.numel() > 0 and whole[0] == ranks * part[0]
    extended = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")  # noqa: SLF001
    return parameter.fsdp_placement.dim == 0 and even and not parameter.offload_to_cpu and not extended


class _Begun(NamedTuple):
    """All-gather that was begun, with the names that FSDP2 reads where nobody waited for it.

    Attributes:
        all_gather_event: recorded behind it.
        inputs: what is gathered, kept until the wait.
        copies: stream that the memory of inputs in another format belongs to.
        all_gather_work: nothing else is to be waited for.
    """

    all_gather_event: torch.Event | None
    inputs: Sequence[Tensor]
    copies: Any
    all_gather_work: None = None


class DirectGather:
    """Direct all-gather of one FSDP2 unit, in the place of that of its ``FSDPParamGroup``, at the same moments.

    Attributes:
        group: of the unit, which fits.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._unshard, self._wait, self._finalize = group.unshard, group.wait_for_unshard, group.finalize_backward
        #: What :meth:`unshard` has begun, and the group remembers as ``_all_gather_result``.
        self._begun: _Begun | None = None
        group.unshard, group.wait_for_unshard, group.finalize_backward = self.unshard, self.wait, self.finalize

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather, if the parameters are shards. Collective over the unit's ranks.

        Args:
            async_op: as FSDP2 takes it, for what it does itself; here, the host never waits for a GPU.
        """
        group = self.group
        in_backward = group._training_state.name == "PRE_BACKWARD"  # noqa: SLF001
        if (
            group._all_gather_result is not None  # noqa: SLF001 - begun
            or not group.is_sharded  # or shared by some of the ranks, after the forward
            or group._all_gather_process_group.size() == 1  # noqa: SLF001
            or (in_backward and not group.unshard_in_backward)
        ):
            self._unshard(async_op)
            return
        self._begun = group._all_gather_result = self._begin()  # noqa: SLF001

    def wait(self) -> None:
        """Let the current stream wait for what was begun, and put whole parameters in the place of shards."""
        group = self.group
        if self._begun is None or group._all_gather_result is not self._begun:  # noqa: SLF001
            self._wait()
            return
        self._land(self._begun)
        for parameter in group.fsdp_params:
            parameter.init_unsharded_param()
        group._to_unsharded()  # noqa: SLF001

    def finalize(self) -> None:
        """End the last backward of a step, after which parameters change."""
        self.drop()
        self._finalize()

    def drop(self) -> None:
        """Free what was requested and not used: a block that did not run."""
        if self._begun is None or self.group._all_gather_result is not self._begun:  # noqa: SLF001
            return
        self._land(self._begun)
        for parameter in self.group.fsdp_params:
            parameter.free_unsharded_param()

    def _land(self, begun: _Begun) -> None:
        self.group.device_handle.current_stream().wait_event(begun.all_gather_event)
        begun.copies.wait_event(begun.all_gather_event)  # its memory may be given to the next unit's inputs now
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
        if copies != current:  # which are behind the copies of a unit with a buffer now, so that can be freed
            shared.all_gather_state = None
        with torch.no_grad(), handle.stream(copies):  # which has nothing to do if formats are the same
            inputs = [parameter.all_gather_inputs[0] for parameter in group.fsdp_params]
        gathers.wait_stream(copies)
        # As data, for autograd's versions: what is gathered again is what the forward has saved.
        outputs = [parameter.all_gather_outputs[0].data for parameter in group.fsdp_params]
        with handle.stream(gathers):
            for dtype in dict.fromkeys(tensor.dtype for tensor in outputs):
                pairs = [pair for pair in zip(outputs, inputs, strict=True) if pair[0].dtype == dtype]
                work = ranks.allgather_into_tensor_coalesced([o for o, _ in pairs], [i for _, i in pairs])
                work.wait()  # the stream does; on a CPU, the host
            return _Begun(gathers.record_event(), inputs, copies)
