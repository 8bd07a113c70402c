"""Defaults that a job, a plugin's record or a cost description leaves out."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.cost import AdapterCost, BlockCost, Exchange, Share, StrategyCost, Weight
from d9d_core.data import DataContext, SampleLengths
from d9d_core.errors import CheckpointError, D9dError, JobError, SaveError, TrainingError
from d9d_core.grid import AXES
from d9d_core.inference import Continuation
from d9d_core.job import JobFile
from d9d_core.job_file.evaluation import Evaluation
from d9d_core.job_file.inference import InferenceBatch
from d9d_core.job_file.job import Best
from d9d_core.job_file.sections.profiling import Profiling
from d9d_core.kernel import Decision, OpSignature
from d9d_core.model import Stage
from d9d_core.plugin import ConfiguredSpec, JobCheckSpec, KernelSpec, ScheduleSpec
from d9d_core.program.placement import Pipeline
from d9d_core.registry.entries import Origin, Problem
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_core.strategy import Applied, Collective, ContextCall, StepShape
from pydantic import BaseModel

JOB = {"steps": 3, "model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer"}


def test_a_job_that_names_only_its_components_has_the_documented_settings() -> None:
    found = JobFile.from_values(JOB, registry=Registry.of(toy)).resolved()
    parts = {"model", "data", "task", "optimizer"}
    assert {section: values for section, values in found.items() if section not in parts} == {
        "run": {"name": "run", "dir": "runs", "description": "", "hparams": {}, "tags": []},
        "seed": 0,
        "device": "auto",
        "deterministic": False,
        "mesh": dict.fromkeys(AXES, 1) | {"ep": 1},
        "batch": {"size": 16, "microbatch": None, "prefetch": 2},
        "parallel": [],
        "pipeline": None,
        "peft": None,
        "precision": {"parameters": "float32", "autocast": None},
        "kernels": {},
        "subscribers": [],
        "loading": {"weights": True, "threads": 4, "read": "each"},
        "timeouts": {"startup": 600.0, "step": 600.0, "checkpoint": 1800.0},
        "plugins": {"allow": None, "block": [], "require": [], "autoload": True, "files": []},
        "epochs": None,
        "steps": 3,
        "lr_schedule": None,
        "gradient_clipping": {"max_norm": 1.0, "p": 2.0},
        "gradients": {"accumulate": None, "bucket_mib": 32},
        "nonfinite": "error",
        "max_skipped": 10,
        "metrics": [],
        "trackers": [],
        "logging": {"every": 10, "max_pending": 2, "peak_tflops": None, "memory": None, "level": None},
        "evaluation": None,
        "profiling": None,
        "garbage_collection": {"every": 100},
        "checkpoint": {
            "every": None,
            "keep": 2,
            "keep_every": None,
            "best": None,
            "resume": "auto",
            "asynchronous": True,
            "tolerate_failures": 10,
            "trainable_only": False,
            "dir": None,
        },
        "export": True,
    }


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (Best, {"series": "eval/loss", "mode": "min", "keep": 1}),
        (InferenceBatch, {"size": 512, "microbatch": 8, "prefetch": 2}),
        (
            Profiling,
            {"every": 100, "warmup": 1, "active": 3, "record_shapes": False, "with_stack": False, "memory": False},
        ),
        (Evaluation, {"packs": 4}),
    ],
)
def test_optional_sections_have_the_documented_settings(section: type[BaseModel], expected: dict[str, Any]) -> None:
    found = {name: field.default for name, field in section.model_fields.items()}
    assert {name: value for name, value in found.items() if name in expected} == expected


def given_by(record: type[Any]) -> dict[str, Any]:
    """Defaults of a dataclass that are numbers or truth values."""
    values = {field.name: field.default for field in fields(record) if field.default is not MISSING}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            Share,
            {"tensor": 1, "context": 1, "experts": 1, "width": 2, "compiled": False, "memory": 85_899_345_920.0},
        ),
        (Weight, {"trains": True}),
        (Exchange, {"stride": 1, "count": 1}),
        (
            BlockCost,
            {
                "parameters": 0,
                "expert_parameters": 0,
                "input": 0.0,
                "workspace": 0.0,
                "count": 1,
                "is_block": True,
                "frozen": 0,
                "frozen_experts": 0,
            },
        ),
        (
            StrategyCost,
            {
                "shards": False,
                "in_place": False,
                "offloads": False,
                "compiled": False,
                "recomputed": 0.0,
                "keeps_attention": False,
                "meets_every": 0,
                "state": 0.0,
                "copies": 0,
            },
        ),
        (
            AdapterCost,
            {
                "trains": False,
                "parameters": 0,
                "flops": 0.0,
                "backward_flops": 0.0,
                "traffic": 0.0,
                "backward_traffic": 0.0,
                "kept": 0.0,
            },
        ),
        (DataContext, {"rank": 0, "ranks": 1, "one_pass": False}),
        (SampleLengths, {"texts": 1}),
        (Continuation, {"temperature": 0.0, "seed": 0}),
        (OpSignature, {"compiled": False, "checkpointed": False, "storing": False}),
        (Decision, {"priority": 0}),
        (Stage, {"index": 0, "count": 1}),
        (ConfiguredSpec, {"composite": False}),
        (ScheduleSpec, {"composite": False, "ordered_transfers": False}),
        (KernelSpec, {"deterministic": True}),
        (JobCheckSpec, {"memory": False}),
        (Pipeline, {"ranks": 1}),
        (Origin, {"editable": False, "seconds": 0.0, "api": 0}),
        (Problem, {"loaded": False}),
        (PluginPolicy, {"autoload": True, "strict": False}),
        (Collective, {"approximate": False, "at_most": False, "every": 1}),
        (StepShape, {"approximate": False}),
        (ContextCall, {"backward": False, "at_most": False}),
        (Applied, {"sequence_ranks": 1, "cuda_graphs": False}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_a_record_leaves_out_is_as_documented(record: type[Any], expected: dict[str, Any]) -> None:
    assert given_by(record) == expected


def test_a_pipeline_has_one_stage_and_a_data_context_says_nothing() -> None:
    assert (Pipeline().hosts, Pipeline().ranks, Pipeline().programs(2)) == ((0,), 1, [])
    context = DataContext(seed=0, batch_size=2, microbatch_size=2, cache_dir=Path())
    context.note("x")
    assert (context.pretrained, context.inputs) == (None, "own")


def test_the_users_errors_end_commands_with_two_and_failures_of_a_run_with_one() -> None:
    assert (D9dError.exit_code, JobError.exit_code) == (2, 2)
    assert (TrainingError.exit_code, SaveError.exit_code, CheckpointError.exit_code) == (1, 1, 2)
