"""Declaration of the metrics."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import MetricSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_metrics() -> Iterator[MetricSpec]:
    """Declare the metrics, which a job selects in ``metrics`` and ``evaluation.metrics``."""
    for name, kind, summary in (
        ("sum", "Sum", "Sum of an observation."),
        ("mean", "Mean", "Mean of an observation."),
        ("weighted_mean", "WeightedMean", "Mean of an observation, weighted by another."),
        ("max", "Max", "Largest value of an observation."),
        ("min", "Min", "Smallest value of an observation."),
    ):
        yield MetricSpec(
            name=name,
            summary=summary,
            config=Ref(f"d9d_metrics.aggregate.config:{kind}Config"),
            build=Ref(f"d9d_metrics.aggregate.metrics:{kind}"),
        )
    yield MetricSpec(
        name="confusion",
        summary="Accuracy, precision, recall, F-beta or a function of your own, for classes or labels.",
        config=Ref("d9d_metrics.confusion.config:ConfusionConfig"),
        build=Ref("d9d_metrics.confusion.metric:ConfusionMetric"),
    )
    yield MetricSpec(
        name="auroc",
        summary="Area under the ROC curve, computed with bins.",
        config=Ref("d9d_metrics.auroc.config:AurocConfig"),
        build=Ref("d9d_metrics.auroc.metric:Auroc"),
    )
    yield MetricSpec(
        name="token_accuracy",
        summary="Fraction of targets among the k most probable tokens, without full logits.",
        config=Ref("d9d_metrics.token_accuracy.config:TokenAccuracyConfig"),
        build=Ref("d9d_metrics.token_accuracy.metric:TokenAccuracy"),
        reads=frozenset({"token_ranks"}),
    )
    yield MetricSpec(
        name="compose",
        summary="Several metrics, each under a name.",
        config=Ref("d9d_metrics.compose.config:ComposeConfig"),
        build=Ref("d9d_metrics.compose.metric:Compose"),
        composite=True,
    )
