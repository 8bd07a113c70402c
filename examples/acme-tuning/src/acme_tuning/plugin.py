"""Declarations of acme-tuning."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import (
    HeadSpec,
    KernelSpec,
    LrScheduleSpec,
    OptimizerSpec,
    PeftSpec,
    Ref,
    ScheduleSpec,
    StrategySpec,
    hookimpl,
)

D9D_API = 2


@hookimpl
def d9d_optimizers() -> Iterator[OptimizerSpec]:
    """Declare the optimizer ``signum``."""
    yield OptimizerSpec(
        name="signum",
        summary="The sign of the averaged gradient.",
        config=Ref("acme_tuning.config:SignumConfig"),
        build=Ref("acme_tuning.signum:Signum"),
    )


@hookimpl
def d9d_lr_schedules() -> Iterator[LrScheduleSpec]:
    """Declare the learning-rate schedule ``cosine_restarts``."""
    yield LrScheduleSpec(
        name="cosine_restarts",
        summary="Cosine that starts again at the full rate, in cycles of growing length.",
        config=Ref("acme_tuning.config:CosineRestartsConfig"),
        build=Ref("acme_tuning.cosine_restarts:cosine_restarts"),
    )


@hookimpl
def d9d_peft_methods() -> Iterator[PeftSpec]:
    """Declare the fine-tuning method ``norms``."""
    yield PeftSpec(
        name="norms",
        summary="Trains only the weights of normalisation layers.",
        config=Ref("acme_tuning.config:NormsConfig"),
        build=Ref("acme_tuning.norms:Norms"),
    )


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare the kernel ``lean`` of the op ``silu_mul``."""
    yield KernelSpec(
        name="lean",
        summary="The gate of SwiGLU with less memory for the backward.",
        op="silu_mul",
        supports=Ref("acme_tuning.silu_mul:supports"),
        build=Ref("acme_tuning.silu_mul:build"),
    )


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """Declare the strategy ``host_activations``."""
    yield StrategySpec(
        name="host_activations",
        summary="Keeps the activations of blocks in host memory until the backward.",
        anchor="checkpointing",
        requires={"model:blocks"},
        config=Ref("acme_tuning.config:HostActivationsConfig"),
        build=Ref("acme_tuning.host_activations:HostActivations"),
    )


@hookimpl
def d9d_schedules() -> Iterator[ScheduleSpec]:
    """Declare the pipeline schedule ``v_gpipe``."""
    yield ScheduleSpec(
        name="v_gpipe",
        summary="All forwards, then all backwards; two stages per rank in a V.",
        handlers=Ref("d9d_pipeline.runtime.handlers:handlers"),
        config=Ref("acme_tuning.config:VGpipeConfig"),
        build=Ref("acme_tuning.v_gpipe:build"),
    )


@hookimpl
def d9d_heads() -> Iterator[HeadSpec]:
    """Declare the head ``two_ends``."""
    yield HeadSpec(
        name="two_ends",
        summary="The first and the last state of a text.",
        config=Ref("acme_tuning.config:TwoEndsConfig"),
    )
