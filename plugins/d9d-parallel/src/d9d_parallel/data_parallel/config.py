"""Configs of the strategies ``replicate``, ``fsdp`` and ``hsdp``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PartConfig
from pydantic import NonNegativeInt, PositiveInt

Dtype = Literal["float32", "bfloat16"]


class DataParallelConfig(PartConfig):
    """Shared fields of the data-parallel strategies ``replicate``, ``fsdp`` and ``hsdp``."""

    compute_dtype: Dtype | None = None
    """Format of parameters and inputs in forward and backward; by default the format of ``precision.parameters``."""
    reduce_dtype: Dtype | None = None
    """Format in which gradients are summed over ranks; by default the widest of ``compute_dtype``, the parameters'
    format and ``gradients.accumulate``."""
    output_dtype: Dtype | None = None
    """Format that the model's floating-point outputs are cast to; by default they are not cast."""
    defer: Literal["nothing", "all_reduce", "everything"] = "nothing"
    """Reductions deferred to the last microbatch, for less communication and more memory: ``all_reduce`` only over
    replicas, ``everything`` all of them. Deferred gradients are accumulated in ``reduce_dtype``."""
    forward_prefetch: NonNegativeInt = 0
    """Number of blocks whose parameters are gathered ahead in the forward. With 0, one block if parameters are gathered
    without copies (direct gather), otherwise none: each block is gathered when the host reaches it."""
    backward_prefetch: NonNegativeInt = 0
    """Number of blocks whose parameters are gathered ahead in the backward; 0 leaves it to FSDP2, which gathers one
    ahead."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and compute on the device."""
    ignore: tuple[str, ...] = ()
    """Patterns of names of parameters that stay whole on every rank, in their own dtype, outside of FSDP2; their
    gradients are all-reduced in buckets."""


class ReplicateConfig(DataParallelConfig):
    """Data parallelism with a replica of the whole model on every rank."""

    name: Literal["replicate"] = "replicate"
    """Selects the plugin."""

    @property
    def needs_no_units(self) -> bool:
        """Whether no setting needs units of FSDP2: gradients can be reduced in place, once per step."""
        return self == ReplicateConfig(defer=self.defer, match=self.match)


class ShardedConfig(DataParallelConfig):
    """Shared fields of the strategies that shard parameters."""

    reshard_after_forward: bool | PositiveInt = True
    """Free a block's gathered parameters after its forward and gather them again in the backward. With a number, the
    backward gathers only among that many ranks; false keeps the gathered parameters until the backward."""


class FsdpConfig(ShardedConfig):
    """Fully sharded data parallelism: each rank keeps a shard of every parameter, gradient and optimizer state."""

    name: Literal["fsdp"] = "fsdp"
    """Selects the plugin."""


class HsdpConfig(ShardedConfig):
    """Hybrid sharded data parallelism: shards within ``dp_shard``, replicas over ``dp_replicate``."""

    name: Literal["hsdp"] = "hsdp"
    """Selects the plugin."""
