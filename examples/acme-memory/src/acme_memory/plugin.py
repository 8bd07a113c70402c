"""Declarations of acme-memory."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import (
    CapabilitySpec,
    DatasetSpec,
    InferenceTaskSpec,
    MetricSpec,
    ModelSpec,
    Ref,
    WriterSpec,
    hookimpl,
)

D9D_API = 2


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """Declare the dataset ``copying``."""
    yield DatasetSpec(
        name="copying",
        summary="Random symbols, a separator, and the same symbols again.",
        config=Ref("acme_memory.config:CopyingConfig"),
        build=Ref("acme_memory.copying:Copying"),
        gives={"tokens": 2, "targets": 2},
    )


@hookimpl
def d9d_models() -> Iterator[ModelSpec]:
    """Declare the model ``ngram``."""
    yield ModelSpec(
        name="ngram",
        summary="A feed-forward network over a fixed number of tokens.",
        config=Ref("acme_memory.config:NgramConfig"),
        build=Ref("acme_memory.ngram:Ngram"),
        tiny=Ref("acme_memory.config:tiny"),
        provides={"model:late_init", "model:causal_lm", "model:context_limit"},
    )


@hookimpl
def d9d_capabilities() -> Iterator[CapabilitySpec]:
    """Declare the capability of models that see a limited number of tokens."""
    yield CapabilitySpec(
        token="model:context_limit",  # noqa: S106 - a capability token
        summary="a module of the model has context_limit(); see acme_memory.ngram:HasContextLimit",
    )


@hookimpl
def d9d_metrics() -> Iterator[MetricSpec]:
    """Declare the metric ``recall``."""
    yield MetricSpec(
        name="recall",
        summary="Share of targets that get more than half of the probability.",
        config=Ref("acme_memory.config:RecallConfig"),
        build=Ref("acme_memory.recall:Recall"),
        reads={"token_loss", "targets"},
    )


@hookimpl
def d9d_inference_tasks() -> Iterator[InferenceTaskSpec]:
    """Declare the inference task ``recall``."""
    yield InferenceTaskSpec(
        name="recall",
        summary="Share of recalled targets of each sample.",
        config=Ref("acme_memory.config:RecallRowsConfig"),
        build=Ref("acme_memory.recall:RecallRows"),
        requires={"model:causal_lm"},
        reads={"tokens": 2, "targets": 2},
    )


@hookimpl
def d9d_writers() -> Iterator[WriterSpec]:
    """Declare the writer ``csv``."""
    yield WriterSpec(
        name="csv",
        summary="CSV with JSON values as cells.",
        config=Ref("acme_memory.config:CsvConfig"),
        build=Ref("acme_memory.table:CsvWriter"),
    )
