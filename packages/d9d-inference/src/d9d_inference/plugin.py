"""Declarations of inference: commands, writers, the subscriber ``samples``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, SubscriberSpec, WriterSpec, hookimpl

D9D_API = 2
#: Requirement of plugin records that need torch. Without torch (as in a CI that only checks job files), using such a
#: record is an error that says how to install torch.
TORCH = frozenset({"import:torch"})


@hookimpl
def d9d_subscribers() -> Iterator[SubscriberSpec]:
    """Declare the subscriber ``samples``."""
    yield SubscriberSpec(
        name="samples",
        summary="Continuations of fixed prompts during training.",
        config=Ref("d9d_inference.generation.config:SamplesConfig"),
        build=Ref("d9d_inference.generation.samples:Samples"),
        requires=TORCH,
    )


@hookimpl
def d9d_writers() -> Iterator[WriterSpec]:
    """Declare the writers ``jsonl`` and ``parquet``."""
    yield WriterSpec(
        name="jsonl",
        summary="One JSON object per row.",
        config=Ref("d9d_inference.config:JsonlWriterConfig"),
        build=Ref("d9d_inference.writers.jsonl:JsonlWriter"),
    )
    yield WriterSpec(
        name="parquet",
        summary="Parquet; needs pyarrow.",
        requires=frozenset({"import:pyarrow"}),
        config=Ref("d9d_inference.config:ParquetWriterConfig"),
        build=Ref("d9d_inference.writers.parquet:ParquetWriter"),
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the commands ``infer``, ``evaluate`` and ``generate``."""
    yield CommandSpec(
        name="infer",
        summary="Run a model over data, and write one row of output for each input row.",
        requires=TORCH,
        app=Ref("d9d_inference.commands.infer:app"),
    )
    yield CommandSpec(
        name="evaluate",
        summary="Measure losses and metrics of a trained model, and compare two models.",
        requires=TORCH,
        app=Ref("d9d_inference.commands.evaluate:app"),
    )
    yield CommandSpec(
        name="generate",
        summary="Generate text with a trained model.",
        requires=TORCH,
        app=Ref("d9d_inference.commands.generate:app"),
    )
