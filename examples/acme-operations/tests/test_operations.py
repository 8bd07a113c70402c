"""Tests of the plugin's own behaviour; conformance.py holds the suites."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from acme_operations.background import Background
from acme_operations.config import BackgroundConfig, HeartbeatConfig
from acme_operations.heartbeat import Heartbeat
from acme_operations.job_diff import job_diff
from acme_operations.plugin import d9d_views
from acme_operations.shared_memory import run
from acme_operations.token_budget import VARIABLE, check
from d9d_core.errors import JobError
from d9d_core.events import StepEnds
from d9d_core.grid import Grid
from d9d_core.job import JobFile
from d9d_core.launcher import LaunchRequest

JOB = Path(__file__).parents[1] / "job.yaml"


def test_every_second_step_beats(tmp_path: Path) -> None:
    heartbeat = Heartbeat(HeartbeatConfig(path=str(tmp_path / "beat"), every=2))
    for step in range(3):
        heartbeat.end(StepEnds(step, Mock()))
    assert json.loads((tmp_path / "beat").read_text())["step"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["beat"]


def test_little_shared_memory_fails_with_advice(tmp_path: Path) -> None:
    health = run(tmp_path, least_mib=10**12)
    assert not health.ok
    assert "--shm-size" in health.advice
    assert run(tmp_path, least_mib=0).ok
    assert run(tmp_path / "absent").ok


def test_a_job_above_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobFile.load(JOB)
    check(job, None)
    monkeypatch.setenv(VARIABLE, "5120")
    check(job, None)
    monkeypatch.setenv(VARIABLE, "5119")
    with pytest.raises(JobError, match=r"20 steps of 8 x 32 tokens are 5,120 tokens, more than ACME_TOKEN_BUDGET=5119"):
        check(job, None)
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(JobError, match="ACME_TOKEN_BUDGET is 'many'; write a number"):
        check(job, None)


def test_the_differing_fields_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(JOB.read_text().replace("lr: 0.01", "lr: 0.02"))
    job_diff(JOB, other)
    assert capsys.readouterr().out.splitlines() == ["optimizer.lr: 0.01 -> 0.02", "1 fields differ"]


def test_a_replica_is_all_axes_but_stages_and_replicas() -> None:
    (view,) = d9d_views()
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 1, "tp": 4}
    assert Grid.of_view(view, mesh).sizes == {"stage": 2, "replica": 2, "within": 12}


def test_a_background_job_is_started_and_its_status_is_told(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(75)"
    request = LaunchRequest(
        name="run", command=(sys.executable, "-c", code), job="", job_file=tmp_path / "job.yaml", folder=tmp_path,
        working_directory=tmp_path, nodes=1, processes=2,
    )  # fmt: skip
    launcher = Background(BackgroundConfig())
    submission = launcher.prepare(request)
    for path, text in submission.files.items():
        path.write_text(text)
    identifier = launcher.submit(submission)
    while (status := launcher.status(identifier, tmp_path, 5)).state == "running":
        time.sleep(0.05)
    assert (status.state, status.exit_status) == ("failed", 75)
    assert status.log == ("['--max-restarts', '3', '--nproc', '2']",)
