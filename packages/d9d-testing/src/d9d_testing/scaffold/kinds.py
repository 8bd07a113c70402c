"""Kinds of plugins for ``d9d new plugin``: declaration, dependencies, and sections of the job file of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """Kind of plugin that ``d9d new plugin`` can write.

    Attributes:
        summary: one line about the example.
        hook: hook that yields the record.
        spec: class of the record.
        build: name in the implementation that the record's ``entry`` refers to; ``{name}`` and ``{Name}`` are replaced.
        entry: field of the record that refers to the implementation; empty if the record is complete without one.
        record: fields of the record in addition to name and summary; ``{package}``, ``{name}`` and ``{Name}`` are
            replaced.
        imports: names of ``d9d_core.plugin`` that the declaration imports in addition to the record's class.
        section: lines of a job file that select the plugin; empty if no section does.
        job: sections of ``job.yaml`` that replace sections of :data:`BASE_JOB`.
        infer: sections of ``infer.yaml`` that replace sections of :data:`INFERENCE_JOB`; ``None``: no such job.
        commands: commands that use the plugin.
        needs: distributions that the implementation imports, in addition to d9d-core and pydantic.
        tests: further distributions that the tests and the jobs need.
        configured: whether the plugin has a config.
        module: whether the plugin has a module with the implementation.
    """

    summary: str
    hook: str
    spec: str
    section: str = ""
    build: str = ""
    entry: str = "build"
    record: Sequence[str] = ()
    imports: Sequence[str] = ("Ref",)
    job: Mapping[str, str] = field(default_factory=dict)
    infer: Mapping[str, str] | None = None
    commands: Sequence[str] = ("d9d plugins show {name}", "d9d train job.yaml")
    needs: Sequence[str] = ("torch>=2.11",)
    tests: Sequence[str] = ()
    configured: bool = True
    module: bool = True


_MODEL = (
    "{name: qwen3, vocab_size: 257, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 1, max_positions: 64}"
)
#: Language model on text that comes with Python; trains in seconds on a CPU.
BASE_JOB: Mapping[str, str] = {
    "run": "{name: {name}}",
    "model": _MODEL,
    "task": "causal_lm",
    "data": '{name: text, sources: ["python:topics"], sequence_length: 32}',
    "optimizer": "{name: adamw, lr: 0.01}",
    "steps": "20",
    "batch": "{size: 8, microbatch: 4}",
    "logging": "{every: 5}",
}
#: Inference job over the model that :data:`BASE_JOB` trains.
INFERENCE_JOB: Mapping[str, str] = {
    "run": "{name: {name}_rows}",
    "model": '{name: qwen3, pretrained: "runs/{name}/model"}',
    "task": "perplexity",
    "data": '{name: text, sources: ["python:topics"], sequence_length: 32}',
    "limit": "8",
}
#: Distributions that :data:`BASE_JOB` needs.
BASE_PACKAGES = ("d9d-data", "d9d-nn", "d9d-optim", "d9d-qwen3")

_INFERENCE = ("d9d plugins show {name}", "d9d train job.yaml", "d9d infer infer.yaml")

KINDS: Mapping[str, Kind] = {
    "metric": Kind(
        summary="Mean loss of a token in bits, or in another unit.",
        hook="d9d_metrics",
        spec="MetricSpec",
        build="{Name}",
        record=('reads={"token_loss", "targets"}',),
        section="metrics: [{name}]",
        job={"metrics": "[{name}]"},
    ),
    "tracker": Kind(
        summary="One CSV row for each logged value.",
        hook="d9d_trackers",
        spec="TrackerSpec",
        build="{Name}",
        section="trackers: [console, {name}]",
        job={"trackers": "[console, {name}]"},
        needs=(),
    ),
    "optimizer": Kind(
        summary="Lion: the sign of the momentum.",
        hook="d9d_optimizers",
        spec="OptimizerSpec",
        build="{Name}",
        section="optimizer: {name: {name}, lr: 1.0e-3}",
        job={"optimizer": "{name: {name}, lr: 1.0e-3}"},
    ),
    "lr_schedule": Kind(
        summary="Inverse square root with a linear warm-up.",
        hook="d9d_lr_schedules",
        spec="LrScheduleSpec",
        build="{name}",
        section="lr_schedule: {name: {name}, warmup_steps: 10}",
        job={"lr_schedule": "{name: {name}, warmup_steps: 10}"},
        needs=(),
    ),
    "task": Kind(
        summary="Next-token prediction with the focal loss.",
        hook="d9d_tasks",
        spec="TaskSpec",
        build="{Name}",
        record=('observes={"token_loss", "targets"}',),
        section="task: {name: {name}, gamma: 2}",
        job={"task": "{name: {name}, gamma: 2}"},
    ),
    "dataset": Kind(
        summary="Arithmetic sequences of tokens.",
        hook="d9d_datasets",
        spec="DatasetSpec",
        build="{Name}",
        section="data: {name: {name}, sequence_length: 32}",
        job={"data": "{name: {name}, sequence_length: 32}"},
    ),
    "model": Kind(
        summary="A small transformer in plain PyTorch.",
        hook="d9d_models",
        spec="ModelSpec",
        build="build",
        record=(
            'provides={"model:late_init", "model:blocks", "model:pipeline", "model:causal_lm"}',
            'tiny=Ref("{package}.config:tiny")',
        ),
        section="model: {name: {name}, vocab_size: 257}\nexport: false  # until the record has a Hugging Face format",
        job={"model": "{name: {name}, vocab_size: 257}", "export": "false"},
    ),
    "strategy": Kind(
        summary="Offloads saved activations of blocks to host memory.",
        hook="d9d_strategies",
        spec="StrategySpec",
        build="{Name}",
        record=('anchor="checkpointing"', 'requires={"model:blocks"}'),
        section="parallel: [{name}]",
        job={"parallel": "[{name}]"},
        tests=("d9d-engine",),
    ),
    "schedule": Kind(
        summary="All forwards, then all backwards; two stages per rank in a V.",
        hook="d9d_schedules",
        spec="ScheduleSpec",
        build="build",
        record=('handlers=Ref("d9d_pipeline.runtime.handlers:handlers")',),
        section="mesh: {pp: 2}\npipeline: {name}",
        job={"pipeline": "{name}"},
        needs=("d9d-pipeline",),
    ),
    "peft": Kind(
        summary="Low-rank adapters of linear layers.",
        hook="d9d_peft_methods",
        spec="PeftSpec",
        build="{Name}",
        section='peft: {name: {name}, rank: 4, match: "*.q_proj"}',
        job={"peft": '{name: {name}, rank: 4, match: "*.q_proj"}'},
    ),
    "kernel": Kind(
        summary="The gate of SwiGLU with less memory for the backward.",
        hook="d9d_kernels",
        spec="KernelSpec",
        build="build",
        record=('op="silu_mul"', 'supports=Ref("{package}.kernel:supports")'),
        section="kernels: {silu_mul: {name}}",
        job={"kernels": "{silu_mul: {name}}"},
        configured=False,
    ),
    "subscriber": Kind(
        summary="Seconds from one step to the next.",
        hook="d9d_subscribers",
        spec="SubscriberSpec",
        build="{Name}",
        section="subscribers: [{name}]",
        job={"subscribers": "[{name}]"},
        needs=(),
    ),
    "inference_task": Kind(
        summary="Counts the improbable tokens of each sample.",
        hook="d9d_inference_tasks",
        spec="InferenceTaskSpec",
        build="{Name}",
        record=('requires={"model:causal_lm"}',),
        section="task: {name: {name}, below: 0.01}",
        infer={"task": "{name: {name}, below: 0.01}"},
        commands=_INFERENCE,
        tests=("d9d-inference",),
    ),
    "writer": Kind(
        summary="CSV with JSON values as cells.",
        hook="d9d_writers",
        spec="WriterSpec",
        build="{Name}",
        section="writer: {name}",
        infer={"writer": "{name}"},
        commands=_INFERENCE,
        needs=(),
        tests=("d9d-inference",),
    ),
    "head": Kind(
        summary="Classes of the largest features of a text.",
        hook="d9d_heads",
        spec="HeadSpec",
        entry="",
        section="model: {name: qwen3, preset: 0.6b, heads: {topic: {kind: {name}, num_classes: 3}}}",
        job={
            "model": _MODEL[:-1] + ", heads: {topic: {kind: {name}, num_classes: 3}}}",
            "task": "classification",
            "data": '{name: labelled, sources: ["python:kinds"], sequence_length: 32}',
        },
        needs=("d9d-nn", "torch>=2.11"),
    ),
    "launcher": Kind(
        summary="Background processes on this machine.",
        hook="d9d_launchers",
        spec="LauncherSpec",
        build="{Name}",
        commands=("d9d train job.yaml", "d9d launch submit job.yaml --engine {name}", "d9d launch status job.yaml"),
        needs=(),
        tests=("d9d-launch",),
    ),
    "view": Kind(
        summary="The mesh as stages, ranks with samples of their own, and ranks that share samples.",
        hook="d9d_views",
        spec="ViewSpec",
        record=(
            'dims=(ViewDim("stage", ("pp",)), ViewDim("data", ("dp_replicate", "dp_shard")), '
            'ViewDim("model", ("cp", "tp")))',
        ),
        imports=("ViewDim",),
        commands=("d9d plugins list", "d9d train job.yaml"),
        needs=(),
        configured=False,
        module=False,
    ),
    "health_check": Kind(
        summary="Free space for temporary files.",
        hook="d9d_health_checks",
        spec="HealthCheckSpec",
        build="run",
        entry="run",
        commands=("d9d doctor",),
        needs=(),
        configured=False,
    ),
    "job_check": Kind(
        summary="Long runs save checkpoints.",
        hook="d9d_job_checks",
        spec="JobCheckSpec",
        build="check",
        entry="run",
        commands=("d9d check job.yaml",),
        needs=(),
        configured=False,
    ),
    "command": Kind(
        summary="Prints the last logged values of a run.",
        hook="d9d_commands",
        spec="CommandSpec",
        build="app",
        entry="app",
        commands=("d9d train job.yaml", "d9d {name} runs/{name}"),
        needs=("typer>=0.16",),
        configured=False,
    ),
    "capability": Kind(
        summary="The model has modules with diagnostics().",
        hook="d9d_capabilities",
        spec="CapabilitySpec",
        entry="",
        commands=("d9d plugins list", "d9d train job.yaml"),
        imports=(),
        configured=False,
    ),
}
