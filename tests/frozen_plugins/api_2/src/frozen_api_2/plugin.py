"""Declarations: one record of every kind."""

from collections.abc import Iterator

from d9d_core.plugin import (
    CapabilitySpec,
    CommandSpec,
    DatasetSpec,
    HealthCheckSpec,
    InferenceTaskSpec,
    JobCheckSpec,
    KernelSpec,
    LrScheduleSpec,
    MetricSpec,
    ModelSpec,
    OptimizerSpec,
    PeftSpec,
    Ref,
    ScheduleSpec,
    StrategySpec,
    SubscriberSpec,
    TaskSpec,
    TrackerSpec,
    ViewDim,
    ViewSpec,
    WriterSpec,
    hookimpl,
)

D9D_API = 2


@hookimpl
def d9d_models() -> Iterator[ModelSpec]:
    yield ModelSpec(
        name="frozen_chain",
        summary="Chain of residual layers.",
        config=Ref("frozen_api_2.config:ChainConfig"),
        build=Ref("frozen_api_2.model:Chain"),
        tiny=Ref("frozen_api_2.config:ChainConfig"),
        hugging_face=Ref("frozen_api_2.format:ChainFormat"),
        model_types=frozenset({"frozen_chain"}),
        flops=Ref("frozen_api_2.costs:flops"),
        provides={"model:blocks", "model:late_init", "model:pipeline", "model:ops", "frozen:chain"},
    )


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    yield StrategySpec(
        name="frozen_scale",
        summary="Scales what the blocks return.",
        config=Ref("frozen_api_2.config:ScaleConfig"),
        build=Ref("frozen_api_2.strategy:Scale"),
        anchor="convert",
        position="after",
        requires={"model:blocks"},
    )


@hookimpl
def d9d_schedules() -> Iterator[ScheduleSpec]:
    yield ScheduleSpec(
        name="frozen_all_forward",
        summary="All forwards, then all backwards.",
        config=Ref("frozen_api_2.config:AllForwardConfig"),
        build=Ref("frozen_api_2.schedule:build"),
        handlers=Ref("d9d_pipeline.runtime.handlers:handlers"),
    )


@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    yield TaskSpec(
        name="frozen_regression",
        summary="Squared error.",
        config=Ref("frozen_api_2.config:RegressionConfig"),
        build=Ref("frozen_api_2.task:Regression"),
        observes={"error"},
        reads={"x": 2, "y": 2},
        requires={"frozen:chain"},
    )


@hookimpl
def d9d_inference_tasks() -> Iterator[InferenceTaskSpec]:
    yield InferenceTaskSpec(
        name="frozen_rows",
        summary="Mean output of each sample.",
        config=Ref("frozen_api_2.config:RowsConfig"),
        build=Ref("frozen_api_2.inference:Rows"),
        reads={"x": 2},
    )


@hookimpl
def d9d_writers() -> Iterator[WriterSpec]:
    yield WriterSpec(
        name="frozen_table",
        summary="Tab-separated values.",
        config=Ref("frozen_api_2.config:TableConfig"),
        build=Ref("frozen_api_2.inference:TableWriter"),
    )


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    yield DatasetSpec(
        name="frozen_waves",
        summary="Random features and their sines.",
        config=Ref("frozen_api_2.config:WavesConfig"),
        build=Ref("frozen_api_2.data:Waves"),
        gives={"x": 2, "y": 2},
    )


@hookimpl
def d9d_metrics() -> Iterator[MetricSpec]:
    yield MetricSpec(
        name="frozen_error",
        summary="Mean and largest absolute error.",
        config=Ref("frozen_api_2.config:ErrorConfig"),
        build=Ref("frozen_api_2.observers:Error"),
        reads={"error"},
    )


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    yield TrackerSpec(
        name="frozen_lines",
        summary="One line for each step.",
        config=Ref("frozen_api_2.config:LinesConfig"),
        build=Ref("frozen_api_2.observers:Lines"),
    )


@hookimpl
def d9d_peft_methods() -> Iterator[PeftSpec]:
    yield PeftSpec(
        name="frozen_last_layers",
        summary="Trains the last layers.",
        config=Ref("frozen_api_2.config:LastLayersConfig"),
        build=Ref("frozen_api_2.strategy:LastLayers"),
    )


@hookimpl
def d9d_optimizers() -> Iterator[OptimizerSpec]:
    yield OptimizerSpec(
        name="frozen_momentum",
        summary="Gradient descent with momentum.",
        config=Ref("frozen_api_2.config:MomentumConfig"),
        build=Ref("frozen_api_2.optimizer:Momentum"),
        cost=Ref("frozen_api_2.costs:momentum"),
    )


@hookimpl
def d9d_lr_schedules() -> Iterator[LrScheduleSpec]:
    yield LrScheduleSpec(
        name="frozen_ramp",
        summary="Rises linearly, then stays.",
        config=Ref("frozen_api_2.config:RampConfig"),
        build=Ref("frozen_api_2.optimizer:ramp"),
    )


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    yield KernelSpec(
        name="frozen_formula",
        summary="Tanh by its formula.",
        op="frozen_act",
        supports=Ref("frozen_api_2.kernel:supports"),
        build=Ref("frozen_api_2.kernel:build"),
    )


@hookimpl
def d9d_subscribers() -> Iterator[SubscriberSpec]:
    yield SubscriberSpec(
        name="frozen_count",
        summary="Counts steps, and ends the run after some.",
        config=Ref("frozen_api_2.config:CountConfig"),
        build=Ref("frozen_api_2.observers:Count"),
    )


@hookimpl
def d9d_views() -> Iterator[ViewSpec]:
    yield ViewSpec(
        name="frozen_view",
        summary="Stages, and all other ranks.",
        dims=(
            ViewDim("frozen_stages", ("pp",)),
            ViewDim("frozen_ranks", ("dp_replicate", "dp_shard", "cp", "tp")),
        ),
    )


@hookimpl
def d9d_health_checks() -> Iterator[HealthCheckSpec]:
    yield HealthCheckSpec(name="frozen_health", summary="Always healthy.", run=Ref("frozen_api_2.commands:health"))


@hookimpl
def d9d_job_checks() -> Iterator[JobCheckSpec]:
    yield JobCheckSpec(name="frozen_job", summary="Prints the number of steps.", run=Ref("frozen_api_2.commands:check"))


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    yield CommandSpec(name="frozen", summary="Prints a greeting.", app=Ref("frozen_api_2.commands:app"))


@hookimpl
def d9d_capabilities() -> Iterator[CapabilitySpec]:
    yield CapabilitySpec(token="frozen:chain", summary="The model maps x to y; use frozen_chain.")
