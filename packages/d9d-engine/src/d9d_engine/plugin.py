"""Declarations of the engine: trackers, subscribers, views of the mesh, health checks, commands. Always loaded."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin.hooks import API_VERSION, hookimpl
from d9d_core.plugin.records import (
    CommandSpec,
    HealthCheckSpec,
    JobCheckSpec,
    SubscriberSpec,
    TrackerSpec,
    ViewDim,
    ViewSpec,
    WriterSpec,
)
from d9d_core.plugin.ref import Ref

D9D_API = API_VERSION
#: In an environment without torch, such as a CI that checks job files, these are refused with its install line.
TORCH = frozenset({"import:torch"})


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Trackers ``console`` and ``jsonl``."""
    yield TrackerSpec(
        name="console",
        summary="One line of text per logged step.",
        config=Ref("d9d_engine.trackers.config:ConsoleConfig"),
        build=Ref("d9d_engine.trackers.console:ConsoleTracker"),
    )
    yield TrackerSpec(
        name="jsonl",
        summary="One JSON object per logged step in <run>/metrics.jsonl.",
        config=Ref("d9d_engine.trackers.config:JsonlConfig"),
        build=Ref("d9d_engine.trackers.jsonl:JsonlTracker"),
    )


@hookimpl
def d9d_subscribers() -> Iterator[SubscriberSpec]:
    """Subscribers ``early_stopping`` and ``samples``."""
    yield SubscriberSpec(
        name="early_stopping",
        summary="Ends the run when a logged series gets no better.",
        config=Ref("d9d_engine.subscribers.config:EarlyStoppingConfig"),
        build=Ref("d9d_engine.subscribers.early_stopping:EarlyStopping"),
    )
    yield SubscriberSpec(
        name="samples",
        summary="Continuations of fixed prompts during training.",
        config=Ref("d9d_engine.generation.config:SamplesConfig"),
        build=Ref("d9d_engine.generation.samples:Samples"),
        requires=TORCH,
    )


@hookimpl
def d9d_writers() -> Iterator[WriterSpec]:
    """Writers ``jsonl`` and ``parquet``."""
    yield WriterSpec(
        name="jsonl",
        summary="One JSON object per row.",
        config=Ref("d9d_engine.inference.config:JsonlWriterConfig"),
        build=Ref("d9d_engine.inference.writers.jsonl:JsonlWriter"),
    )
    yield WriterSpec(
        name="parquet",
        summary="Parquet; needs pyarrow.",
        requires=frozenset({"import:pyarrow"}),
        config=Ref("d9d_engine.inference.config:ParquetWriterConfig"),
        build=Ref("d9d_engine.inference.writers.parquet:ParquetWriter"),
    )


@hookimpl
def d9d_views() -> Iterator[ViewSpec]:
    """Views of the mesh that strategies share."""
    pipeline, replicate, tensor = (ViewDim(axis, (axis,)) for axis in ("pp", "dp_replicate", "tp"))
    yield ViewSpec(
        name="dense",
        summary="Parameters that every token uses: replicas of shards.",
        dims=(pipeline, replicate, ViewDim("fsdp", ("dp_shard", "cp")), tensor),
    )
    yield ViewSpec(
        name="expert",
        summary="Parameters that only some tokens use.",
        dims=(
            pipeline,
            ViewDim("expert_replicate", ("dp_replicate",), over=("ep",)),
            ViewDim("expert_fsdp", ("dp_shard", "cp", "tp"), over=("ep",)),
            ViewDim("ep", ("ep",)),
        ),
    )
    yield ViewSpec(
        name="batch",
        summary="Who sees which samples.",
        dims=(pipeline, ViewDim("dp", ("dp_replicate", "dp_shard")), ViewDim("cp", ("cp",)), tensor),
    )
    yield ViewSpec(
        name="world",
        summary="All ranks in one row.",
        dims=(ViewDim("world", ("pp", "dp_replicate", "dp_shard", "cp", "tp")),),
    )


@hookimpl
def d9d_health_checks() -> Iterator[HealthCheckSpec]:
    """Health checks of torch, of the device and of the network."""
    yield HealthCheckSpec(
        name="torch",
        summary="torch imports",
        requires=TORCH,
        run=Ref("d9d_engine.cli.health:check_torch"),
    )
    yield HealthCheckSpec(
        name="device",
        summary="which device trains",
        requires=TORCH,
        run=Ref("d9d_engine.cli.health:check_device"),
    )
    yield HealthCheckSpec(
        name="network",
        summary="whom runs of several processes trust",
        run=Ref("d9d_engine.cli.health:check_network"),
    )


@hookimpl
def d9d_job_checks() -> Iterator[JobCheckSpec]:
    """The plan of a job: its model on the meta device, strategies, kernels, memory."""
    yield JobCheckSpec(
        name="plan",
        summary="Model, strategies, kernels and memory, without a GPU.",
        requires=TORCH,
        run=Ref("d9d_engine.cli.plan:check_plan"),
        memory=True,
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Commands that need torch."""
    yield CommandSpec(
        name="train",
        summary="Train, or continue after an interruption.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.train:app"),
    )
    yield CommandSpec(
        name="infer",
        summary="Run a model over data, and write a row of output for each row.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.infer:app"),
    )
    yield CommandSpec(
        name="evaluate",
        summary="Measure losses and metrics of a trained model, and compare two models.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.evaluate:app"),
    )
    yield CommandSpec(
        name="explain",
        summary="Show what a job does, part by part, and why.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.plan:explain_app"),
    )
    yield CommandSpec(
        name="plan",
        summary="Find the layout of a job that fits and is fastest, without a GPU.",
        app=Ref("d9d_engine.planner.command:app"),
    )
    yield CommandSpec(
        name="verify",
        summary="Compare layouts of a job with one process.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.verify:app"),
    )
    yield CommandSpec(
        name="state",
        summary="Look at checkpoints, convert them, compare them.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.state:app"),
    )
    yield CommandSpec(
        name="generate",
        summary="Write text with a trained model.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.generate:app"),
    )
    yield CommandSpec(
        name="sweep",
        summary="Train a job with every combination of some values.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.sweep:app"),
    )
    yield CommandSpec(
        name="runs",
        summary="List runs and compare them.",
        requires=TORCH,
        app=Ref("d9d_engine.cli.runs:app"),
    )
    yield CommandSpec(
        name="report",
        summary="Write a page about one run or several: curves, tables, layout, start-up, plugins.",
        requires=TORCH,
        app=Ref("d9d_engine.report.command:app"),
    )
