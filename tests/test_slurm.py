"""Jobs on a real Slurm of two nodes: crashes, lost machines, cancellation, errors and hostile names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.slurm_cluster import Cluster, reason_not_to_run, slurm_cluster, wait_for

REASON = reason_not_to_run()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no Slurm can be started: {REASON}")
JOB = {
    "steps": 400,
    "batch": {"size": 4, "microbatch": 2},
    "model": {
        "name": "qwen3",
        "vocab_size": 512,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_positions": 32,
    },
    "task": "causal_lm",
    "data": {"name": "certificate_tokens", "vocab_size": 512, "sequence_length": 32},
    "optimizer": {"name": "adamw", "lr": 1.0e-3},
    "checkpoint": {"every": 50},
    "logging": {"every": 50},
    "trackers": ["jsonl"],
    "device": "cpu",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster() as started:
        yield started


class Submitted:
    """A job that was submitted by ``d9d launch``, and its run."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str, name: str = "run", **fields: object) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run = folder / "runs" / name
        self.file = folder / "job.yaml"
        self.file.write_text(yaml.safe_dump({**JOB, "run": {"name": name}, **fields}))
        size = ("--processes", "1", *(() if "--nodes" in options else ("--nodes", "2")))
        self.output = self.d9d(
            "launch", "submit", "--engine", "slurm", str(self.file), "--processes", "1", *size, *options
        )
        (self.id,) = re.findall(r"submitted to slurm as (\d+);", self.output)

    def d9d(self, *arguments: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "d9d_core", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.cluster.env, capture_output=True, text=True, check=False, timeout=150
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def status(self, status: int = 0) -> str:
        return self.d9d("launch", "status", str(self.file), "--lines", "100", status=status)

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: list(self.run.glob(f"checkpoints/step-*{step}/manifest.json")), f"step {step}:\n{self.log()}")

    def wait_for_state(self, *states: str) -> str:
        wait_for(lambda: self.cluster.state(self.id) in states, f"{states}:\n{self.log()}")
        return self.cluster.state(self.id)

    def log(self) -> str:
        file = self.run / "launch" / f"slurm-{self.id}.log"
        return file.read_text() if file.exists() else ""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of the same job that nothing disturbs, without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    command = [sys.executable, "-m", "d9d_core", "train", "job.yaml", "--nproc", "2"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    return folder / "runs" / "run"


def assert_same_weights(*runs: Path) -> None:
    first, second = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert first.keys() == second.keys()
    assert [name for name in first if not first[name].equal(second[name])] == []


@pytest.mark.thorough
def test_paths_of_users_run_no_code_and_no_variable_of_the_shell_reaches_the_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / 'it\'s "a" $(touch pwned) `touch pwned` %j ;touch pwned #x'
    folder.mkdir()
    cluster.env.update(A_TOKEN="secret-of-the-shell", WANTED="wanted value")
    words = ("--option", "setup=['env > env.txt']", "--option", "export=[WANTED]", "--option", "partition=ci")
    job = Submitted(cluster, folder, *words, name="a-run_1.x", steps=3)
    assert job.wait_for_state("COMPLETED", "FAILED") == "COMPLETED", job.log()
    assert "finished after step 3 of 3" in job.status()
    assert "finished 3 steps" in job.status()
    assert not list(tmp_path.rglob("pwned"))
    environ = (folder / "env.txt").read_text()
    assert "WANTED=wanted value" in environ
    assert "secret-of-the-shell" not in environ
    told = [file for file in (job.run / "launch").iterdir() if b"secret-of-the-shell" in file.read_bytes()]
    assert told == []


@pytest.mark.full
@pytest.mark.parametrize("event", ["killed rank", "stop request"])
def test_a_disturbed_job_restarts_and_ends_with_equal_bits(
    cluster: Cluster, tmp_path: Path, undisturbed: Path, event: str
) -> None:
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(100)
    if event == "killed rank":
        os.kill(cluster.pid_of_rank(job.id, 1), signal.SIGKILL)
    else:  # Slurm does this before a time limit
        cluster.run("scancel", "--signal=TERM", job.id)
    cluster.start_now(job.id)
    assert "waiting" in job.status() or "running" in job.status()
    assert job.wait_for_state("COMPLETED", "FAILED") == "COMPLETED", job.log()
    assert cluster.restarts(job.id) == 1
    resumed = re.search(r"resumed at step (\d+) of 400", job.log())
    assert resumed is not None
    assert int(resumed[1]) >= 100
    assert "restarts: 1" in job.status()
    assert "last logged step: 400" in job.status()
    assert_same_weights(job.run, undisturbed)


@pytest.mark.full
def test_a_lost_machine_restarts_the_job_which_ends_with_equal_bits(
    cluster: Cluster, tmp_path: Path, undisturbed: Path
) -> None:
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(50)
    rank = cluster.pid_of_rank(job.id, 1)
    cluster.kill_node("n2")
    os.kill(rank, signal.SIGKILL)  # what runs on a machine is lost with it
    wait_for(lambda: cluster.restarts(job.id) == 1, f"a requeue:\n{job.log()}")
    cluster.start_node("n2")
    cluster.start_now(job.id)
    assert job.wait_for_state("COMPLETED", "FAILED") == "COMPLETED", job.log()
    assert "resumed at step" in job.log()
    assert_same_weights(job.run, undisturbed)


@pytest.mark.full
def test_a_refusal_of_slurm_is_told_and_a_waiting_job_leaves_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="error: sbatch: .*partition"):
        Submitted(cluster, tmp_path, "--option", "partition=absent")
    assert not (tmp_path / "runs" / "run" / "launch" / "submission.json").exists()
    cluster.run("scontrol", "update", "partitionname=ci", "state=down")
    job = Submitted(cluster, tmp_path)
    assert f"slurm {job.id}: waiting (PENDING" in job.status()
    assert "cancelled; it did not train" in job.d9d("launch", "cancel", "job.yaml")
    assert job.wait_for_state("CANCELLED") == "CANCELLED"
    assert f"slurm {job.id}: cancelled (CANCELLED" in job.status()
    cluster.run("scontrol", "update", "partitionname=ci", "state=up")


@pytest.mark.full
def test_a_cancelled_job_saves_and_is_not_restarted(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted(cluster, tmp_path, steps=100_000)
    job.wait_for_step(50)
    refused = job.d9d("launch", "submit", "--engine", "slurm", str(job.file), "--nodes", "2", status=2)
    assert f"this run was submitted to slurm as {job.id}, which is running" in refused
    assert "all ranks finish their step, save and stop" in job.d9d("launch", "cancel", "--engine", "slurm", "job.yaml")
    job.wait_for_state("FAILED", "CANCELLED")
    assert cluster.restarts(job.id) == 0
    stop = json.loads((job.run / "stopped.json").read_text())
    assert stop["request"] == "SIGTERM"
    assert list(job.run.glob(f"checkpoints/step-*{stop['step']}/manifest.json"))
    job.file.write_text(job.file.read_text() + "# changed\n")
    text = job.status()
    assert f"slurm {job.id}: stopped (FAILED" in text
    assert f"stopped by SIGTERM after step {stop['step']} of 100000, and saved" in text
    assert "job.yaml has changed since the submission" in text
    assert "has ended already" in job.d9d("launch", "cancel", str(job.run), status=2)


#: Subscriber that raises an error of the job's data in rank 1 alone.
BREAKS = """
import os
from typing import Literal

from d9d_core.config import PluginConfig
from d9d_core.errors import DataError
from d9d_core.events import StepEnds
from d9d_core.plugin import Ref, SubscriberSpec, hookimpl
from d9d_core.subscriber import Subscribes, subscribe

D9D_API = 2


class BreaksConfig(PluginConfig):
    '''Breaks.'''

    name: Literal["breaks"] = "breaks"
    '''Selects this subscriber.'''


class Breaks(Subscribes):
    def __init__(self, config): ...

    @subscribe(StepEnds)
    def step(self, event):
        if event.step == 5 and os.environ["SLURM_PROCID"] == "1":
            raise DataError("record 7 is damaged")


@hookimpl
def d9d_subscribers():
    config, build = Ref(f"{__name__}:BreaksConfig"), Ref(f"{__name__}:Breaks")
    yield SubscriberSpec(name="breaks", summary="For a test.", config=config, build=build)
"""


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["all", "one"])
def test_an_error_of_the_job_is_not_restarted(cluster: Cluster, tmp_path: Path, ranks: str) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    data = {"name": "text", "sources": ["missing.txt"], "sequence_length": 32, "tokenizer": "bytes"}
    fields = {"data": data} if ranks == "all" else {"subscribers": ["breaks"]}
    job = Submitted(cluster, tmp_path, "--plugin", "breaks.py", **fields)
    assert job.wait_for_state("FAILED", "COMPLETED") == "FAILED"
    assert cluster.restarts(job.id) == 0
    text = job.status(status=1)
    assert f"slurm {job.id}: failed (FAILED" in text
    assert ("missing.txt" if ranks == "all" else "record 7 is damaged") in text


@pytest.mark.full
def test_the_script_of_the_documentation_restarts_no_error_of_one_rank(cluster: Cluster, tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "launching.md").read_text()
    (block,) = re.findall(r"^    #!/bin/bash\n(?:    .*\n)+", text, re.MULTILINE)
    lines = [line[4:] for line in block.splitlines() if "gpus" not in line and "--cpus-per-task=12" not in line]
    script = (
        "\n".join(lines)
        .replace("--ntasks-per-node=8", "--ntasks-per-node=1")
        .replace(" --cpus-per-task=$SLURM_CPUS_PER_TASK", "")
    )
    (tmp_path / "job.sh").write_text(script.replace("=$SLURM_CPUS_PER_TASK", "=1") + "\n")
    (tmp_path / "breaks.py").write_text(BREAKS)
    fields = {"subscribers": ["breaks"], "plugins": {"files": ["breaks.py"]}, "mesh": {"dp_shard": 2}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, **fields, "parallel": ["fsdp"]}))
    log = tmp_path / "log"
    words = ("sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={log}", str(tmp_path / "job.sh"))
    number = cluster.run(*words).strip()
    wait_for(lambda: cluster.state(number) in ("FAILED", "COMPLETED"), "the end of the job")
    assert (cluster.state(number), cluster.restarts(number)) == ("FAILED", 0), log.read_text()
    assert json.loads((tmp_path / "runs" / "run" / "failed.json").read_text())["status"] == 2
    assert not (tmp_path / "runs" / "run" / "stopped.json").exists()


@pytest.mark.full
def test_a_run_continues_on_another_number_of_machines_and_one_line_says_so(cluster: Cluster, tmp_path: Path) -> None:
    for nodes, steps, line in (
        (2, 50, None),
        (1, 100, "resumed at step 50 of 100, on 1 process instead of 2"),
        (2, 150, "resumed at step 100 of 150, on 2 processes instead of 1"),
    ):
        job = Submitted(cluster, tmp_path, "--nodes", str(nodes), steps=steps, export=False)
        assert job.wait_for_state("COMPLETED", "FAILED") == "COMPLETED", job.log()
        told = [text for text in job.log().splitlines() if text.startswith("resumed")]
        assert told == ([line] if line else [])
