"""Configs of the strategies ``replicate``, ``fsdp`` and ``hsdp``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import NonNegativeInt, PositiveInt

Dtype = Literal["float32", "bfloat16"]


class DataParallelConfig(PluginConfig):
    """Shared fields of the data-parallel strategies ``replicate``, ``fsdp`` and ``hsdp``."""

    compute_dtype: Dtype | None = None
    """Format of parameters and inputs in forward and backward; that of ``precision.parameters`` if absent."""
    reduce_dtype: Dtype | None = None
    """Format in which gradients are summed over ranks; if absent, the widest of ``compute_dtype``, the parameters'
    format and ``gradients.accumulate``."""
    output_dtype: Dtype | None = None
    """Format that the model's floating-point outputs are cast to; as they come if absent."""
    defer: Literal["nothing", "all_reduce", "everything"] = "nothing"
    """What waits for the last microbatch: ``all_reduce`` keeps sums over one shard group, ``everything`` whole
    gradients of all parameters; less communication for more memory. What waits adds up in ``reduce_dtype``."""
    forward_prefetch: NonNegativeInt = 0
    """Blocks whose parameters are requested ahead in the forward; 0 requests one where parameters are gathered
    directly, else each when the host gets there."""
    backward_prefetch: NonNegativeInt = 0
    """The same in the backward; 0 leaves it to FSDP2, which requests one block ahead."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory, and compute on the device."""
    ignore: tuple[str, ...] = ()
    """Patterns over parameter names that stay whole on every rank, in their own format; their gradients are summed in
    buckets."""


class ReplicateConfig(DataParallelConfig):
    """Data parallelism with a replica of the whole model on every rank."""

    name: Literal["replicate"] = "replicate"
    """Selects the plugin."""

    @property
    def needs_no_units(self) -> bool:
        """Whether nothing here asks for units of FSDP2: gradients may be reduced where they are, once a step."""
        return self == ReplicateConfig(defer=self.defer)


class ShardedConfig(DataParallelConfig):
    """Shared fields of the strategies that shard parameters."""

    reshard_after_forward: bool | PositiveInt = True
    """Free a block's whole parameters after its forward and gather them again for the backward; a number gathers within
    groups of that many ranks only; false keeps them."""


class FsdpConfig(ShardedConfig):
    """Fully sharded data parallelism: each rank keeps a shard of every parameter, gradient and optimizer state."""

    name: Literal["fsdp"] = "fsdp"
    """Selects the plugin."""


class HsdpConfig(ShardedConfig):
    """Hybrid sharded data parallelism: shards within ``dp_shard``, replicas over ``dp_replicate``."""

    name: Literal["hsdp"] = "hsdp"
    """Selects the plugin."""
