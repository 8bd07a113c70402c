"""Jobs on real Ray clusters of CPUs on this machine: crashes, cancellation, errors, a job server and a preemption."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.engine_environments import make, python_of
from tests.test_slurm import JOB

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """Environment variables for commands of Ray: its files are in a scratch folder, and it sends no statistics."""
    if (reason := make("ray")) is not None:
        pytest.skip(f"Ray is not tested: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # paths of sockets have at most 107 characters
    names = ("RAY_ADDRESS", "PYTHONPATH", "VIRTUAL_ENV")
    found = {name: value for name, value in os.environ.items() if name not in names}
    yield found | {
        "PATH": f"{python_of('ray').parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """Cluster of Ray on this machine, whose nodes have one CPU each; its job server listens at the loopback address.

    Args:
        environ: environment variables of the nodes.
    """

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self.port, self.server_port = free_port(), free_port()
        self.start("--head", f"--port={self.port}", f"--dashboard-port={self.server_port}", "--include-dashboard=true")
        # Before a further node starts, whose agent would compete with the head's for a port.
        wait_for(self.takes_jobs, lambda: "the job server")
        self.add()

    @property
    def server(self) -> dict[str, str]:
        """Environment variables of a machine that uses the job server."""
        return {**self.environ, "RAY_ADDRESS": f"http://127.0.0.1:{self.server_port}"}

    def takes_jobs(self) -> bool:
        """Whether the job server has found an agent that starts jobs, some seconds after its own start."""
        command = [str(python_of("ray")), "-m", "ray.scripts.scripts", "job", "submit", "--no-wait", "--", "true"]
        return subprocess.run(command, env=self.server, capture_output=True, check=False, timeout=120).returncode == 0

    def add(self) -> None:
        """Start a further node."""
        self.start(f"--address=127.0.0.1:{self.port}")

    def start(self, *options: str) -> None:
        self.ray("start", "--node-ip-address=127.0.0.1", "--num-cpus=1", "--object-store-memory=100000000", *options)

    def ray(self, *words: str) -> str:
        command = [str(python_of("ray")), "-m", "ray.scripts.scripts", *words]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def preempt(self) -> None:
        """Announce that a node will be taken away: the one of a worker, but not the head, which is the cluster."""
        parents = {parent_of(worker) for worker in workers(self.environ)}
        raylets = [Path(f"/proc/{parent}/cmdline").read_text().split("\0") for parent in parents]
        words = next(words for words in raylets if "--head" not in words)  # both may be others
        (node,) = [word.partition("=")[2] for word in words if word.startswith("--node_id=")]
        options = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test", "--deadline-remaining-seconds=120"]
        self.ray("drain-node", f"--address=127.0.0.1:{self.port}", f"--node-id={node}", *options)


@pytest.fixture(scope="module")
def cluster(environ: dict[str, str]) -> Iterator[Cluster]:
    more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.3"}
    made = Cluster({**environ, **more})
    yield made
    for folder in Path("/proc").glob("[0-9]*"):  # ray stop would also end clusters of other people
        try:
            if f"HOME={environ['HOME']}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Submitted:
    """A job that was submitted by ``d9d launch`` to Ray, and its run."""

    def __init__(self, environ: dict[str, str], folder: Path, *options: str, **fields: object) -> None:
        self.environ, self.folder = environ, folder
        self.run = folder / "runs" / "run"
        self.file = folder / "job.yaml"
        self.file.write_text(yaml.safe_dump({**JOB, "trackers": ["console", "jsonl"], **fields}))
        self.output = self.d9d("launch", "submit", "job.yaml", "--engine", "ray", "--processes", "2", *options)
        (self.id,) = re.findall(r"submitted to ray as (\S+);", self.output)

    def d9d(self, *arguments: str, status: int = 0) -> str:
        command = [str(python_of("ray")), "-m", "d9d_core", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def status(self, status: int = 0) -> str:
        # Nodes of one machine share a folder of logs, so that a line comes once for each node.
        return self.d9d("launch", "status", "job.yaml", "--lines", "1000", status=status)

    def log(self) -> str:
        file = self.run / "launch" / "ray.log"
        return file.read_text() if file.exists() else ""

    def end(self) -> dict[str, object]:
        file = self.run / "launch" / "ray-end.json"
        wait_for(file.exists, lambda: f"the end of the driver:\n{self.log()}")
        return json.loads(file.read_text())

    def wait_for_step(self, step: int) -> None:
        saved = f"checkpoints/step-*{step}/manifest.json"
        wait_for(lambda: bool(list(self.run.glob(saved))), lambda: f"step {step}:\n{self.log()}")


def wait_for(condition: Callable[[], bool], what: Callable[[], str], seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited for {what()}"
        time.sleep(0.3)


def workers(environ: dict[str, str]) -> list[int]:
    """Processes of the workers, in the order of their start; workers of other clusters have another HOME."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"HOME={environ['HOME']}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if ours and (folder / "cmdline").read_bytes().startswith(b"ray::RayTrainWorker"):
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


def parent_of(process: int) -> int:
    found = re.findall(r"^PPid:\s+(\d+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return int(found[0])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of the same job that nothing disturbs, without Ray."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    command = [sys.executable, "-m", "d9d_core", "train", "job.yaml", "--nproc", "2"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    return folder / "runs" / "run"


def assert_same_weights(*runs: Path) -> None:
    first, second = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert first.keys() == second.keys()
    assert [name for name in first if not first[name].equal(second[name])] == []


def test_a_killed_worker_restarts_the_run_which_ends_with_equal_bits(
    environ: dict[str, str], tmp_path: Path, undisturbed: Path
) -> None:
    job = Submitted(environ, tmp_path)
    job.wait_for_step(100)
    assert "running (driver is process" in job.status()
    os.kill(workers(environ)[-1], signal.SIGKILL)
    assert job.end() == {"status": 0, "cause": "", "reported": 400}
    text = job.status()
    resumed = re.search(r"resumed at step (\d+) of 400", text)
    assert resumed is not None, text
    assert int(resumed[1]) >= 100
    assert "finished (status 0, reported step 400)" in text
    assert "  step 400/400" in text, "the lines of the run are shown without Ray's prefix"
    assert_same_weights(job.run, undisturbed)


def test_a_cancelled_run_saves_is_not_restarted_and_continues_when_it_is_submitted_again(
    environ: dict[str, str], tmp_path: Path
) -> None:
    environ = environ | {"A_TOKEN": "secret-of-the-shell"}
    job = Submitted(environ, tmp_path, steps=100_000)
    job.wait_for_step(50)
    refused = job.d9d("launch", "submit", "job.yaml", "--engine", "ray", "--processes", "2", status=2)
    assert "which is running" in refused
    assert "all ranks finish their step, save and stop" in job.d9d("launch", "cancel", "job.yaml")
    assert job.end()["status"] == 75
    stop = json.loads((job.run / "stopped.json").read_text())
    assert stop["request"] == "d9d launch cancel"
    text = job.status()
    assert "stopped (status 75" in text
    assert f"stopped by d9d launch cancel after step {stop['step']} of 100000, and saved" in text
    assert "nothing to cancel" in job.d9d("launch", "cancel", "job.yaml", status=2)
    again = Submitted(environ, tmp_path, steps=stop["step"] + 5)
    assert again.end()["status"] == 0
    assert f"resumed at step {stop['step']} of" in again.status()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert [file for file in files if b"secret-of-the-shell" in file.read_bytes()] == []


def test_an_error_of_the_job_is_told_and_not_restarted(environ: dict[str, str], tmp_path: Path) -> None:
    data = {"name": "text", "sources": ["missing.txt"], "sequence_length": 32, "tokenizer": "bytes"}
    job = Submitted(environ, tmp_path, data=data)
    assert job.end()["status"] == 2
    text = job.status(status=1)
    assert "failed (status 2" in text
    assert "missing.txt" in text
    # Ranks that wait for the failed one die, so that Ray may start the workers once more; they end at once.
    assert job.log().count("(from ") == 2, "the rank tells its error once, and the driver"


def test_a_run_of_a_job_server_continues_after_a_preemption_and_ends_with_equal_bits(
    cluster: Cluster, tmp_path: Path, undisturbed: Path
) -> None:
    cluster.add()  # for the worker of the preempted node
    job = Submitted(cluster.server, tmp_path)
    assert job.id.startswith("job/raysubmit_")
    job.wait_for_step(50)
    cluster.preempt()
    assert "running (RUNNING)" in job.status()
    assert job.end() == {"status": 0, "cause": "", "reported": 400}
    text = job.status()
    stopped = re.search(r"a preemption: stopped after step (\d+) of 400 and saved", text)
    assert stopped is not None, text
    assert f"resumed at step {stopped[1]} of 400" in text, "the stop saved, so that no step is repeated"
    assert_same_weights(job.run, undisturbed)


def test_a_cancelled_run_of_a_job_server_saves(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted(cluster.server, tmp_path, steps=100_000)
    job.wait_for_step(50)
    assert "all ranks finish their step, save and stop" in job.d9d("launch", "cancel", "job.yaml")
    assert job.end()["status"] == 75
    step = json.loads((job.run / "stopped.json").read_text())["step"]
    text = job.status()
    assert re.search(r": stopped \((RUNNING|was stopped); status 75", text), "the server may learn of the end later"
    assert f"stopped by d9d launch cancel after step {step} of 100000, and saved" in text
