"""Declarations of the toy plugin; see the package's docstring."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import (
    DatasetSpec,
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
    hookimpl,
)

D9D_API = 2


@hookimpl
def d9d_models() -> Iterator[ModelSpec]:
    """Toy models: chains of small blocks."""
    yield ModelSpec(
        name="toy_model",
        summary="A chain of residual tanh blocks.",
        config=Ref("d9d_testing.toy.config:ToyModelConfig"),
        build=Ref("d9d_testing.toy.model:build"),
        tiny=Ref("d9d_testing.toy.config:ToyModelConfig"),
        hugging_face=Ref("d9d_testing.toy.format:ToyFormat"),
        model_types=frozenset({"toy"}),
        provides={"model:blocks", "model:late_init", "model:pipeline"},
    )

    yield ModelSpec(
        name="toy_linears",
        summary="A chain of residual blocks around torch.nn.Linear.",
        config=Ref("d9d_testing.toy.config:ToyLinearsConfig"),
        build=Ref("d9d_testing.toy.linears:build"),
        tiny=Ref("d9d_testing.toy.config:ToyLinearsConfig"),
        provides={"model:blocks", "model:late_init"},
    )


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """Toy datasets: random features with a known target, and random tokens."""
    yield DatasetSpec(
        name="toy_data",
        summary="Random features and a smooth function of them.",
        config=Ref("d9d_testing.toy.config:ToyDataConfig"),
        build=Ref("d9d_testing.toy.data:ToyStream"),
        gives={"x": 2, "y": 2, "mask": 1},
    )
    yield DatasetSpec(
        name="toy_tokens",
        summary="Random tokens.",
        config=Ref("d9d_testing.toy.config:ToyTokensConfig"),
        build=Ref("d9d_testing.toy.data:ToyTokens"),
        gives={"tokens": 2, "targets": 2},
    )


@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    """Toy task: regression."""
    yield TaskSpec(
        name="toy_task",
        summary="Squared error.",
        config=Ref("d9d_testing.toy.config:ToyTaskConfig"),
        build=Ref("d9d_testing.toy.task:ToyTask"),
        reads={"x": 2, "y": 2, "mask": 1},
        observes={"absolute"},
    )


@hookimpl
def d9d_optimizers() -> Iterator[OptimizerSpec]:
    """Toy optimizer: momentum."""
    yield OptimizerSpec(
        name="toy_optimizer",
        summary="Gradient descent with momentum.",
        config=Ref("d9d_testing.toy.config:ToyOptimizerConfig"),
        build=Ref("d9d_testing.toy.optimizer:ToyOptimizer"),
    )


@hookimpl
def d9d_metrics() -> Iterator[MetricSpec]:
    """Toy metric: mean absolute error."""
    yield MetricSpec(
        name="toy_metric",
        summary="Mean absolute error over the logging interval.",
        config=Ref("d9d_testing.toy.config:ToyMetricConfig"),
        build=Ref("d9d_testing.toy.task:ToyMetric"),
        reads={"absolute"},
    )


@hookimpl
def d9d_subscribers() -> Iterator[SubscriberSpec]:
    """Toy subscriber: a recorder of events."""
    yield SubscriberSpec(
        name="toy_recorder",
        summary="Writes the name of every event.",
        config=Ref("d9d_testing.toy.config:ToyRecorderConfig"),
        build=Ref("d9d_testing.toy.observers:ToyRecorder"),
    )


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Toy tracker, which may fail."""
    yield TrackerSpec(
        name="toy_tracker",
        summary="Appends its calls to a file and may fail in one.",
        config=Ref("d9d_testing.toy.config:ToyTrackerConfig"),
        build=Ref("d9d_testing.toy.observers:ToyTracker"),
    )


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """Toy strategies: a working one, and one whose requirement never holds."""
    yield StrategySpec(
        name="toy_strategy",
        summary="Halves the outputs of blocks.",
        config=Ref("d9d_testing.toy.config:ToyStrategyConfig"),
        build=Ref("d9d_testing.toy.modifiers:ToyStrategy"),
        anchor="tensor",
        requires={"model:blocks"},
    )
    yield StrategySpec(
        name="toy_pipeline_strategy",
        summary="Requires a trait that the toy model lacks.",
        config=Ref("d9d_testing.toy.config:ToyPipelineStrategyConfig"),
        build=Ref("d9d_testing.toy.modifiers:ToyStrategy"),
        anchor="tensor",
        requires={"model:experts"},
    )


@hookimpl
def d9d_peft_methods() -> Iterator[PeftSpec]:
    """Toy fine-tuning methods: one trains given parameters, one adds adapters."""
    yield PeftSpec(
        name="toy_peft",
        summary="Trains given parameters.",
        config=Ref("d9d_testing.toy.config:ToyPeftConfig"),
        build=Ref("d9d_testing.toy.modifiers:ToyPeft"),
    )
    yield PeftSpec(
        name="toy_adapter",
        summary="Trains a low-rank adapter of each linear layer.",
        config=Ref("d9d_testing.toy.config:ToyAdapterConfig"),
        build=Ref("d9d_testing.toy.adapter:ToyAdapter"),
    )


@hookimpl
def d9d_schedules() -> Iterator[ScheduleSpec]:
    """Toy schedule with a selectable defect."""
    yield ScheduleSpec(
        name="toy_schedule",
        summary="The single-stage program, possibly with missing actions.",
        config=Ref("d9d_testing.toy.config:ToyScheduleConfig"),
        build=Ref("d9d_testing.toy.modifiers:ToySchedule"),
    )
