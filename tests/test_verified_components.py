"""``d9d verify`` accepts a sound job with each installed task, dataset, optimizer and fine-tuning method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_engine.job import Job
from d9d_verify.layouts import layout_values, ops_of, parse_layout, scaled_values

from tests.verified_jobs import SECTIONS, jobs

Command = Callable[..., tuple[int, str, str]]
LAYOUT = "dp_shard=2:fsdp"


@pytest.mark.thorough
def test_a_job_of_each_component_can_run_scaled_down_in_one_process_and_in_a_layout(tmp_path: Path) -> None:
    registry = discover(PluginPolicy())
    found = dict(jobs(registry, tmp_path))
    assert {name.rpartition(" ")[0] for name in found} == set(SECTIONS)
    assert {"peft method lora", "optimizer muon", "optimizer schedule_free", "task dpo"} <= found.keys()
    for values in found.values():
        job = Job.from_values(values, registry=registry)
        layout = parse_layout(LAYOUT, job)
        scaled = scaled_values(job, [layout], steps=4)
        Job.from_values(layout_values(scaled, layout, ops_of(job, scaled)), registry=registry).check(2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_job_of_each_component_passes(
    tmp_path: Path, d9d: Command, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # a job names a function of verified_jobs.py
    alarms = {}
    for name, values in jobs(discover(PluginPolicy()), tmp_path):
        file = tmp_path / "job.json"
        file.write_text(json.dumps({"precision": {"parameters": dtype}} | values))
        status, out, err = d9d("verify", str(file), "--layout", LAYOUT, "--json")
        if status:
            alarms[name] = json.loads(out)[0]["diverged"] if out else err
    assert alarms == {}
