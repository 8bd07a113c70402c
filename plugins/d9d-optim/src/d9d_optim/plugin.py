"""Declaration of the optimizers, the learning-rate schedules and the command ``d9d lr``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, LrScheduleSpec, OptimizerSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_optimizers() -> Iterator[OptimizerSpec]:
    """Declare the optimizers, which a job selects by the name in its section ``optimizer``."""
    yield OptimizerSpec(
        name="adam",
        summary="Adam, fused, with or without decoupled weight decay.",
        config=Ref("d9d_optim.optimizer.config:AdamConfig"),
        build=Ref("d9d_optim.optimizer.adam:Adam"),
        cost=Ref("d9d_optim.costs:adam"),
    )
    yield OptimizerSpec(
        name="adamw",
        summary="Adam with decoupled weight decay, fused.",
        config=Ref("d9d_optim.optimizer.config:AdamWConfig"),
        build=Ref("d9d_optim.optimizer.adamw:AdamW"),
        cost=Ref("d9d_optim.costs:adamw"),
    )
    yield OptimizerSpec(
        name="sgd",
        summary="Stochastic gradient descent with momentum, fused.",
        config=Ref("d9d_optim.optimizer.config:SGDConfig"),
        build=Ref("d9d_optim.optimizer.sgd:SGD"),
        cost=Ref("d9d_optim.costs:sgd"),
    )
    yield OptimizerSpec(
        name="lion",
        summary="Lion: steps by the sign of an average of gradients.",
        config=Ref("d9d_optim.optimizer.config:LionConfig"),
        build=Ref("d9d_optim.optimizer.lion:Lion"),
        cost=Ref("d9d_optim.costs:lion"),
    )
    yield OptimizerSpec(
        name="stochastic_adamw",
        summary="AdamW for bfloat16 weights with stochastic rounding, without a float32 copy.",
        config=Ref("d9d_optim.optimizer.config:StochasticAdamWConfig"),
        build=Ref("d9d_optim.optimizer.stochastic_adamw:StochasticAdamW"),
        cost=Ref("d9d_optim.costs:stochastic_adamw"),
    )
    yield OptimizerSpec(
        name="muon",
        summary="Orthogonalised updates for the matrices of hidden layers, AdamW for other parameters.",
        config=Ref("d9d_optim.optimizer.config:MuonConfig"),
        build=Ref("d9d_optim.optimizer.muon:Muon"),
        cost=Ref("d9d_optim.costs:muon"),
    )
    yield OptimizerSpec(
        name="schedule_free",
        summary="AdamW that averages its weights instead of lowering the learning rate.",
        config=Ref("d9d_optim.optimizer.config:ScheduleFreeConfig"),
        build=Ref("d9d_optim.optimizer.schedule_free:ScheduleFree"),
        cost=Ref("d9d_optim.costs:schedule_free"),
    )
    yield OptimizerSpec(
        name="ema",
        summary="Averages of the weights over steps, on top of another optimizer, for evaluation and export.",
        config=Ref("d9d_optim.optimizer.config:EmaConfig"),
        build=Ref("d9d_optim.optimizer.ema:ema"),
        composite=True,
        cost=Ref("d9d_optim.costs:ema"),
    )
    yield OptimizerSpec(
        name="torch",
        summary="Any subclass of torch.optim.Optimizer, by its import path.",
        config=Ref("d9d_optim.optimizer.config:TorchConfig"),
        build=Ref("d9d_optim.optimizer.any_torch:TorchOptimizer"),
    )


@hookimpl
def d9d_lr_schedules() -> Iterator[LrScheduleSpec]:
    """Declare the learning-rate schedules, which a job selects by the name in its section ``lr_schedule``."""
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
        name="linear",
        summary="Linear warm-up, then linear decay to a fraction of the base learning rate.",
        config=Ref("d9d_optim.schedule.config:LinearConfig"),
        build=Ref("d9d_optim.schedule.schedules:linear"),
    )
    yield LrScheduleSpec(
        name="warmup_stable_decay",
        summary="Linear warm-up, a constant phase at the base learning rate, and a decay at the end.",
        config=Ref("d9d_optim.schedule.config:WarmupStableDecayConfig"),
        build=Ref("d9d_optim.schedule.schedules:warmup_stable_decay"),
    )
    yield LrScheduleSpec(
        name="inverse_sqrt",
        summary="Linear warm-up, then the inverse square root of the step.",
        config=Ref("d9d_optim.schedule.config:InverseSqrtConfig"),
        build=Ref("d9d_optim.schedule.schedules:inverse_sqrt"),
    )
    yield LrScheduleSpec(
        name="torch",
        summary="Any scheduler of torch that depends only on the step, by its import path.",
        config=Ref("d9d_optim.schedule.config:TorchScheduleConfig"),
        build=Ref("d9d_optim.schedule.torch_scheduler:torch_scheduler"),
    )
    yield LrScheduleSpec(
        name="piecewise",
        summary="Chain of phases, each with a length, a curve and a factor to reach.",
        config=Ref("d9d_optim.schedule.config:PiecewiseConfig"),
        build=Ref("d9d_optim.schedule.schedules:piecewise"),
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the command ``d9d lr``, which shows the learning rate of a job."""
    yield CommandSpec(
        name="lr",
        summary="Show the learning rate of a job, step by step.",
        app=Ref("d9d_optim.cli.commands:app"),
    )
