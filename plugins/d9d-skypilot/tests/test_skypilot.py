"""The launcher ``skypilot``: its task file, the script of the machines, and calls of ``sky``."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core.errors import LaunchError
from d9d_core.launcher import LaunchRequest
from d9d_skypilot.config import SkyPilotConfig
from d9d_skypilot.launcher import SkyPilotLauncher
from d9d_skypilot.task import run_script, task_name
from d9d_testing.stand_ins import StandIns
from pydantic import ValidationError

NOON = datetime(2026, 11, 28, 12, 0, 5, tzinfo=UTC)
NAME = "d9d-mine-1128120005"
FIELDS: dict[str, Any] = {"volume": "team-runs", "gpu": "H100"}


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    made = StandIns(tmp_path / "bin", ["sky"])
    made.first_in_path(monkeypatch)
    return made


def launcher(**fields: Any) -> SkyPilotLauncher:
    return SkyPilotLauncher(SkyPilotConfig(**FIELDS | fields), lambda: NOON)


def request(**fields: Any) -> LaunchRequest:
    folder = Path("/shared/my runs/mine/launch")
    made = LaunchRequest(
        name="mine",
        command=("/usr/bin/python", "-m", "d9d_core", "train", str(folder / "job.yaml"), "--no-plugins"),
        job="run:\n  name: mine\nsteps: 5\n",
        job_file=folder / "job.yaml",
        folder=folder,
        working_directory=Path("/home/someone"),
        nodes=2,
        processes=8,
    )
    return replace(made, **fields)


def task(wanted: LaunchRequest | None = None, **fields: Any) -> dict[str, Any]:
    (text,) = launcher(**fields).prepare(wanted or request()).files.values()
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_the_script_is_readable_in_the_task_file() -> None:
    (text,) = launcher().prepare(request()).files.values()
    script = yaml.safe_load(text)["run"]
    assert script.count("\n") > 1
    assert all(f"\n  {line}\n" in text for line in script.splitlines() if line)


def test_a_task_asks_for_machines_storage_and_a_restart_after_a_stop() -> None:
    fields = {
        "infra": "aws/us-east-1", "cpus": 96, "memory_gib": 900, "disk_gib": 500, "spot": True,
        "image": "registry.example.org/team/d9d:1", "setup": ["pip install a", "echo done"],
    }  # fmt: skip
    found = task(**fields)
    assert (found["name"], found["num_nodes"], found["volumes"]) == (NAME, 2, {"/runs": "team-runs"})
    assert found["setup"] == "set -e\npip install a\necho done\n"
    assert found["resources"] == {
        "infra": "aws/us-east-1",
        "accelerators": "H100:8",
        "cpus": "96+",
        "memory": "900+",
        "disk_size": 500,
        "use_spot": True,
        "image_id": "docker:registry.example.org/team/d9d:1",
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]},
    }
    plain = task(request(device="cpu"), gpu=None)
    assert plain["resources"].keys() == {"job_recovery"}
    assert "setup" not in plain
    bucket = task(request(nodes=1), volume=None, bucket="s3://team/runs", mount="/data/runs", gpus_per_node=4)
    assert bucket["file_mounts"] == {"/data/runs": {"source": "s3://team/runs", "mode": "MOUNT_CACHED"}}
    assert bucket["resources"]["accelerators"] == "H100:4"
    assert "--set run.dir=/data/runs" in bucket["run"]


def test_secrets_are_named_and_read_by_sky_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden-value")
    submission = launcher(secrets=["HF_TOKEN"]).prepare(request())
    (file,) = submission.files
    assert submission.command == (
        "sky", "jobs", "launch", "--yes", "--detach-run", "--secret", "HF_TOKEN", str(file),
    )  # fmt: skip
    assert "hidden-value" not in str(submission)


def test_what_machines_cannot_have_is_refused() -> None:
    with pytest.raises(LaunchError, match="give --option gpu=H100"):
        task(gpu=None)
    with pytest.raises(LaunchError, match="--nodes 2: several machines cannot write one run into a bucket"):
        task(volume=None, bucket="s3://team")
    with pytest.raises(LaunchError, match="--plugin"):
        task(request(command=(*request().command, "--plugin", "/home/mine.py")))
    with pytest.raises(LaunchError, match="90,000 bytes"):
        task(request(job="x" * 90_000))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"infra": "a b"}, "infra"), ({"gpu": "H100:8"}, "gpu"), ({"image": '"; reboot'}, "image"),
        ({"volume": "a/b"}, "volume"), ({"bucket": "s3://a b", "volume": None}, "bucket"), ({"mount": "runs"}, "mount"),
        ({"setup": ["a\nb"]}, "one line of shell"), ({"secrets": ["A=B"]}, "secrets"), ({"python": "a b"}, "python"),
        ({"volume": None}, "either volume or bucket"), ({"bucket": "s3://a"}, "either volume or bucket"),
    ],
)  # fmt: skip
def test_fields_that_could_change_a_task_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        SkyPilotConfig(**FIELDS | fields)


@pytest.mark.parametrize(
    ("run", "name"), [("My.run_1", "d9d-my-run-1-x"), ("---", "d9d-x"), ("9" * 90, f"d9d-{'9' * 34}-x")]
)
def test_names_of_tasks_begin_with_a_letter_whatever_the_run_is_called(run: str, name: str) -> None:
    assert task_name(run, "x") == name


#: Python of the machines that ends with the next of some statuses, and writes down its arguments.
PYTHON = """#!/bin/bash
echo "$*" >> "$CALLS"
count=$(wc -l < "$CALLS")
set -- {statuses}
exit "${{!count}}"
"""


def run(place: Path, script: str, statuses: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script with a Python of prepared statuses and without pauses; return the end and the calls of Python."""
    for name, text in (("python3", PYTHON.format(statuses=statuses)), ("sleep", "#!/bin/sh\n")):
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    environ = {
        "PATH": f"{place}:/usr/bin:/bin", "HOME": str(place), "CALLS": str(place / "calls"), "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=False)
    return done, (place / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("statuses", "starts", "final"),
    [("0", 1, 0), ("2", 1, 2), ("75", 1, 75), ("1 137 0", 3, 0), ("1 2", 2, 2), ("1 1 1 1", 3, 1)],
)
def test_the_script_restarts_after_every_status_but_finished_stopped_and_an_error_of_the_job(
    tmp_path: Path, statuses: str, starts: int, final: int
) -> None:
    script = run_script(SkyPilotConfig(**FIELDS, restarts=2), request())
    done, calls = run(tmp_path, script, statuses)
    assert (done.returncode, len(calls)) == (final, starts), done.stderr
    size = "--nproc 8 --nodes 2 --node-rank 1 --master 10.0.0.1:29500"
    assert calls[0] == f"-m d9d_core train {tmp_path}/.d9d/job.yaml --set run.dir=/runs --no-plugins {size}"
    assert (tmp_path / ".d9d" / "job.yaml").read_text() == request().job
    alone = run_script(SkyPilotConfig(**FIELDS), request(nodes=1))
    assert "--nproc 8 --alone &" in alone
    assert '[ "$restarts" -lt 10 ] || break' in alone


def test_the_script_passes_sigterm_on_and_waits_for_the_save(tmp_path: Path) -> None:
    saves = 'trap \'sleep 0.3; touch "$HOME/saved"; exit 75\' TERM; touch "$HOME/began"; while :; do sleep 0.05; done'
    (tmp_path / "python3").write_text(f"#!/bin/bash\n{saves}\n")
    (tmp_path / "python3").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    script = run_script(SkyPilotConfig(**FIELDS), request(nodes=1))
    process = subprocess.Popen(["bash", "-c", script], env=environ)
    until = time.monotonic() + 30
    while not (tmp_path / "began").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
    assert (tmp_path / "saved").exists()


def test_a_task_is_submitted_and_a_refusal_told(sky: StandIns, tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    submission = launcher().prepare(request(folder=folder, job_file=Path(request().command[4])))
    assert launcher().submit(submission) == NAME
    assert sky.calls() == [["sky", "jobs", "launch", "--yes", "--detach-run", str(folder / "skypilot.yaml")]]
    sky.answer("sky", "jobs", "launch", text="ValueError: no cloud is enabled", status=1)
    with pytest.raises(LaunchError, match="sky jobs launch: ValueError: no cloud is enabled"):
        launcher().submit(submission)


def test_a_missing_sky_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, sky: StandIns) -> None:
    launcher().require()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="pip install 'skypilot"):
        launcher().require()
    with pytest.raises(LaunchError, match="sky not found"):
        launcher().cancel(NAME)


def queue(**fields: Any) -> str:
    other = {"job_name": "other", "status": "FAILED"}
    return f"a note of the client\n{json.dumps([other, {'job_name': NAME, **fields}])}"


@pytest.mark.parametrize(
    ("fields", "state", "detail"),
    [
        ({"status": "PENDING"}, "waiting", "PENDING"),
        ({"status": "RECOVERING", "recovery_count": 2}, "waiting", "RECOVERING, recovered: 2"),
        ({"status": "RUNNING", "infra": "aws/us-east-1"}, "running", "RUNNING, aws/us-east-1"),
        ({"status": "SUCCEEDED"}, "finished", "SUCCEEDED"),
        ({"status": "CANCELLED"}, "cancelled", "CANCELLED"),
        ({"status": "FAILED", "failure_reason": "exit code 2"}, "failed", "FAILED, exit code 2"),
        ({"status": "FAILED_NO_RESOURCE"}, "failed", "FAILED_NO_RESOURCE"),
        ({"status": "NEW_WORD"}, "unknown", "NEW_WORD"),
        ({"status": None}, "unknown", ""),
        ({}, "unknown", ""),
    ],
)
def test_the_state_of_a_job_is_told_with_its_log(
    sky: StandIns, fields: dict[str, Any], state: str, detail: str
) -> None:
    sky.answer("sky", "jobs", "queue", text=queue(**fields))
    sky.answer("sky", "jobs", "logs", text="step 1\nstep 2\nstep 3")
    found = launcher().status(NAME, Path("unused"), 2)
    assert (found.state, found.detail) == (state, detail)
    assert found.log == (() if state == "waiting" else ("step 2", "step 3"))


def test_an_answer_that_is_no_queue_is_told(sky: StandIns) -> None:
    for text in ("no JSON", "[1"):
        sky.answer("sky", "jobs", "queue", text=text)
        with pytest.raises(LaunchError, match="the answer is not JSON"):
            launcher().status(NAME, Path("unused"), 1)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo noise; echo the cause >&2", "the cause"),
        ("echo the cause", "the cause"),
        ("echo >&2", "exit status 3"),
    ],
)
def test_a_command_that_fails_is_told_by_its_errors_or_else_by_its_output_or_its_status(
    sky: StandIns, script: str, said: str
) -> None:
    (sky.folder / "sky").write_text(f"#!/bin/sh\n{script}\nexit 3\n")
    with pytest.raises(LaunchError, match=rf"^sky jobs queue: {said}$"):
        launcher().cancel(NAME)


def test_a_job_is_cancelled_once(sky: StandIns) -> None:
    sky.answer("sky", "jobs", "queue", text=queue(status="RUNNING"))
    assert "30 s" in launcher().cancel(NAME)
    assert sky.calls()[-1] == ["sky", "jobs", "cancel", "--yes", "--name", NAME]
    launcher(volume=None, bucket="s3://team").cancel(NAME)
    assert sky.calls()[-1] == ["sky", "jobs", "cancel", "--yes", "--graceful", "--name", NAME]
    sky.answer("sky", "jobs", "queue", text=queue(status="CANCELLED"))
    with pytest.raises(LaunchError, match="has ended already"):
        launcher().cancel(NAME)


def test_the_options_of_the_readme_are_valid() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"^```yml[^\n]*\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert SkyPilotConfig(**yaml.safe_load(block)).gpu == "H100"


JOB = """
run: {name: mine}
steps: 2
batch: {size: 8}
task: causal_lm
optimizer: {name: adamw, lr: 1.0e-3}
model: {name: qwen3, vocab_size: 512, hidden_size: 32, num_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
        head_dim: 16, intermediate_size: 64, max_positions: 32}
data: {name: certificate_tokens, vocab_size: 512, sequence_length: 32}
device: cpu
"""


@pytest.mark.full
def test_the_scripts_of_two_machines_train_one_job(tmp_path: Path) -> None:
    """The machines' own scripts run here, with the variables that SkyPilot sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    config = SkyPilotConfig(**FIELDS, python=sys.executable, mount=str(tmp_path / "volume"), restarts=0)
    script = run_script(config, request(processes=1, job=JOB)).replace("29500", port)
    machines = []
    for index in ("0", "1"):
        (tmp_path / index).mkdir()
        place = {"SKYPILOT_NODE_RANK": index, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2"}
        environ = {**os.environ, **place, "HOME": str(tmp_path / index), "GLOO_SOCKET_IFNAME": "lo"}
        environ.pop("RANK", None)
        script_of_machine = script.replace(" --no-plugins", "")
        machines.append(subprocess.Popen(["bash", "-c", script_of_machine], env=environ, cwd=tmp_path))
    assert [machine.wait(timeout=120) for machine in machines] == [0, 0]
    assert json.loads((tmp_path / "volume" / "mine" / "finished.json").read_text())["step"] == 2
