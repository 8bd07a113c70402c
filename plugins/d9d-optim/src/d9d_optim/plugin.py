"""Declaration of the optimizers and the learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import LrScheduleSpec, OptimizerSpec, Ref, hookimpl

D9D_API = 1


@hookimpl
def d9d_optimizers() -> Iterator[OptimizerSpec]:
    """Optimizers, selected by ``optimizer``."""
    yield OptimizerSpec(
        name="adamw",
        summary="Adam with decoupled weight decay, fused.",
        config=Ref("d9d_optim.optimizer.config:AdamWConfig"),
        build=Ref("d9d_optim.optimizer.adamw:AdamW"),
    )
    yield OptimizerSpec(
        name="sgd",
        summary="Stochastic gradient descent with momentum, fused.",
        config=Ref("d9d_optim.optimizer.config:SGDConfig"),
        build=Ref("d9d_optim.optimizer.sgd:SGD"),
    )


@hookimpl
def d9d_lr_schedules() -> Iterator[LrScheduleSpec]:
    """Learning-rate schedules, selected by ``lr_schedule``."""
    yield LrScheduleSpec(
        name="constant",
        summary="The base learning rate in every step.",
        config=Ref("d9d_optim.schedule.config:ConstantConfig"),
        build=Ref("d9d_optim.schedule.schedules:constant"),
    )
    yield LrScheduleSpec(
        name="cosine",
        summary="Linear warm-up, then half a cosine down to a fraction of the base learning rate.",
        config=Ref("d9d_optim.schedule.config:CosineConfig"),
        build=Ref("d9d_optim.schedule.schedules:cosine"),
    )
    yield LrScheduleSpec(
        name="piecewise",
        summary="Any chain of phases, each with a length, a curve and a value to reach.",
        config=Ref("d9d_optim.schedule.config:PiecewiseConfig"),
        build=Ref("d9d_optim.schedule.schedules:piecewise"),
    )
