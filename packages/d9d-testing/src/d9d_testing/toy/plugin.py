"""Declarations of the toy plugin; see the package's docstring."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import DatasetSpec, MetricSpec, ModelSpec, OptimizerSpec, Ref, TaskSpec, hookimpl

D9D_API = 1


@hookimpl
def d9d_models() -> Iterator[ModelSpec]:
    """A chain of small blocks."""
    yield ModelSpec(
        name="toy_model",
        summary="A chain of residual tanh blocks.",
        config=Ref("d9d_testing.toy.config:ToyModelConfig"),
        build=Ref("d9d_testing.toy.model:build"),
        tiny=Ref("d9d_testing.toy.config:ToyModelConfig"),
        hugging_face=Ref("d9d_testing.toy.model:ToyFormat"),
        provides={"model:blocks", "model:late_init"},
    )


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """Random features with a known target."""
    yield DatasetSpec(
        name="toy_data",
        summary="Random features and a smooth function of them.",
        config=Ref("d9d_testing.toy.config:ToyDataConfig"),
        build=Ref("d9d_testing.toy.data:ToyStream"),
    )


@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    """Regression."""
    yield TaskSpec(
        name="toy_task",
        summary="Squared error.",
        config=Ref("d9d_testing.toy.config:ToyTaskConfig"),
        build=Ref("d9d_testing.toy.task:ToyTask"),
    )


@hookimpl
def d9d_optimizers() -> Iterator[OptimizerSpec]:
    """Momentum."""
    yield OptimizerSpec(
        name="toy_optimizer",
        summary="Gradient descent with momentum.",
        config=Ref("d9d_testing.toy.config:ToyOptimizerConfig"),
        build=Ref("d9d_testing.toy.optimizer:ToyOptimizer"),
    )


@hookimpl
def d9d_metrics() -> Iterator[MetricSpec]:
    """Largest error."""
    yield MetricSpec(
        name="toy_metric",
        summary="Mean absolute error since the last log entry.",
        config=Ref("d9d_testing.toy.config:ToyMetricConfig"),
        build=Ref("d9d_testing.toy.task:ToyMetric"),
    )
