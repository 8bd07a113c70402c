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
        record: fields of the record in addition to name and summary; ``{package}``, ``{name}`` and ``{Name}`` are
            replaced.
        section: lines of a job file that select the plugin.
        job: sections of ``job.yaml`` that replace sections of :data:`BASE_JOB`; an empty text removes a section.
        needs: distributions that the implementation imports, in addition to d9d-core and pydantic.
        tests: further distributions that the tests and ``job.yaml`` need.
        configured: whether the plugin has a config.
    """

    summary: str
    hook: str
    spec: str
    section: str
    build: str
    record: Sequence[str] = ()
    job: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ("torch>=2.11",)
    tests: Sequence[str] = ()
    configured: bool = True


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
#: Distributions that :data:`BASE_JOB` needs.
BASE_PACKAGES = ("d9d-data", "d9d-nn", "d9d-optim", "d9d-qwen3")

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
}
