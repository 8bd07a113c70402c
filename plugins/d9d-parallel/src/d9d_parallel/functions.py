"""Strategies as functions, for training loops of your own (:mod:`d9d_engine.own_loop`).

Start here: the keyword arguments of a function are the fields of the strategy in a job file::

    from d9d_parallel.functions import fsdp, tensor_parallel

    tensor_parallel(stages, match=["*.ffn"])
    fsdp(stages, match=["layers.*"], compute_dtype="bfloat16")

Each function changes the modules in place, before they are allocated, and is collective over all ranks. Call the
functions in the order of this module.
"""

from __future__ import annotations

from typing import Any

from d9d_core.strategy import Applied
from d9d_engine.own_loop import Stages

from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.activation_checkpointing.strategy import ActivationCheckpointing
from d9d_parallel.compile.config import CompileConfig
from d9d_parallel.compile.strategy import Compile
from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.context_parallel.strategy import ContextParallel
from d9d_parallel.data_parallel.config import FsdpConfig, HsdpConfig, ReplicateConfig
from d9d_parallel.data_parallel.strategy import Fsdp, Hsdp, Replicate
from d9d_parallel.tensor_parallel.config import TensorParallelConfig
from d9d_parallel.tensor_parallel.strategy import TensorParallel

__all__ = [
    "activation_checkpointing", "compile_blocks", "context_parallel", "fsdp", "hsdp", "replicate", "tensor_parallel",
]  # fmt: skip


def tensor_parallel(stages: Stages, **fields: Any) -> Applied:
    """Split matrices over ``tp``, as the model's modules declare; fields of ``TensorParallelConfig``."""
    return stages.apply(TensorParallel(TensorParallelConfig(**fields)), "tensor_parallel")


def context_parallel(stages: Stages, **fields: Any) -> Applied:
    """Split the positions of samples over ``cp``; fields of ``ContextParallelConfig``."""
    return stages.apply(ContextParallel(ContextParallelConfig(**fields)), "context_parallel")


def activation_checkpointing(stages: Stages, **fields: Any) -> Applied:
    """Recompute blocks in the backward; fields of ``ActivationCheckpointingConfig``."""
    strategy = ActivationCheckpointing(ActivationCheckpointingConfig(**fields))
    return stages.apply(strategy, "activation_checkpointing")


def compile_blocks(stages: Stages, **fields: Any) -> Applied:
    """Compile each block by torch.compile; fields of ``CompileConfig``."""
    return stages.apply(Compile(CompileConfig(**fields)), "compile")


def replicate(stages: Stages, **fields: Any) -> Applied:
    """Keep the whole model, or matched modules, on every rank; fields of ``ReplicateConfig``."""
    return stages.apply(Replicate(ReplicateConfig(**fields)), "replicate")


def fsdp(stages: Stages, **fields: Any) -> Applied:
    """Shard parameters, gradients and optimizer state over ``dp_shard`` and ``cp``; fields of ``FsdpConfig``."""
    return stages.apply(Fsdp(FsdpConfig(**fields)), "fsdp")


def hsdp(stages: Stages, **fields: Any) -> Applied:
    """Shard over ``dp_shard`` with replicas over ``dp_replicate``; fields of ``HsdpConfig``."""
    return stages.apply(Hsdp(HsdpConfig(**fields)), "hsdp")
