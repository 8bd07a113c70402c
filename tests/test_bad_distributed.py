"""What goes wrong with several processes ends all of them, with one message that says which rank, where and why.

Others of the kind stand elsewhere: damaged and missing files, ranks that contradict each other (test_checkpoint_ranks),
a cause among its consequences (test_failure_causes), restarts, a dead launcher (test_launch), stuck ranks of all sorts
(test_watchdog).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import describe_rank
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import STOPPED
from d9d_engine.supervision.failure import Failure, FailureReporter
from d9d_testing.layouts import job_of
from d9d_testing.world import RankFailedError, World
from safetensors.torch import load_file
from torch import distributed as dist

Write = Callable[..., Path]
D9d = Callable[..., tuple[int, str, str]]
Start = Callable[..., "subprocess.Popen[str]"]
PLUGINS = ["d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_qwen3.plugin"]
FSDP2: dict[str, Any] = {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]}
PATIENCE = 120

#: The dataset ``text``, which gives one rank trouble when its sixth pack is asked for.
TROUBLE = """
import resource
import time
from collections.abc import Iterator
from typing import Any, Literal

from d9d_core.plugin import DatasetSpec, Ref, hookimpl
from d9d_core.data import DataContext
from d9d_core.types import Pack
from d9d_data.config import TextConfig
from d9d_data.stream.text import build_text

class TroubledConfig(TextConfig):
    name: Literal["troubled"] = "troubled"
    what: Literal["sleeps", "raises", "full disk"]

class Troubled:
    def __init__(self, config: TroubledConfig, context: DataContext) -> None:
        self.stream = build_text(config, context)
        self.what = config.what if context.rank == 1 else ""
        self.packs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def next_pack(self) -> Pack:
        self.packs += 1
        if self.packs == 6:
            self.have_trouble()
        return self.stream.next_pack()

    def have_trouble(self) -> None:
        if self.what == "sleeps":
            time.sleep(600)
        elif self.what == "raises":
            raise ValueError("an unreadable sample")
        elif self.what == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    yield DatasetSpec(
        name="troubled",
        summary="Text, with trouble on rank 1.",
        config=Ref(f"{__name__}:TroubledConfig"),
        build=Ref(f"{__name__}:Troubled"),
    )
"""


@pytest.fixture
def troubled(small_job: Write, tmp_path: Path) -> Callable[..., Path]:
    """Write a job for two ranks, one of which has trouble."""

    def write(what: str, **sections: Any) -> Path:
        (tmp_path / "trouble.py").write_text(TROUBLE)
        data = {"name": "troubled", "what": what, "sources": [str(tmp_path / "corpus")], "sequence_length": 32}
        return small_job(**FSDP2, data=data, plugins=[str(tmp_path / "trouble.py")], **sections)

    return write


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command line, or a module, in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, module: str = "d9d_core", **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, **pipes, text=True, env=os.environ | environ))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], status: int) -> tuple[str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, err
    return out, err


def wait_for(true: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- before anything starts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {**FSDP2, "mesh": {"dp_shard": 4}, "batch": {"size": 4}},
            "dp_shard=4 = 4 ranks, but the job was started with 2",
        ),
        (
            {**FSDP2, "batch": {"size": 5}},
            "batch.size 5 fits no data-parallel layout of 2 processes, which share no divisor with it; use 4 or 6",
        ),
        ({**FSDP2, "batch": {"size": 4, "microbatch": 4}}, "is 2 samples each, not a multiple of batch.microbatch 4"),
        ({"mesh": {"dp_shard": 2}}, "mesh.dp_shard is 2, but no component of the job uses that axis"),
    ],
    ids=["other world", "odd batch", "large microbatch", "unused axis"],
)
def test_what_cannot_be_distributed_is_refused_before_anything_starts(
    small_job: Write, d9d: D9d, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    status, out, err = d9d("train", str(small_job(**sections)), "--nproc", "2")
    assert status == 2
    assert text in err
    assert out == ""


@pytest.mark.full
def test_ranks_with_different_jobs_all_end_and_one_says_why(small_job: Write, start: Start) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job = small_job(**FSDP2)
    ranks = [
        start("train", job, "--set", f"optimizer.lr={lr}", RANK=str(rank), LOCAL_RANK=str(rank), **place)
        for rank, lr in enumerate((0.01, 0.02))
    ]
    texts = [end(process, 2)[1] for process in ranks]
    node = ProcessEnv.from_environment({}).node
    expected = (
        f"error: the job differs across ranks: optimizer.lr: rank 0 ({node}) 0.01, rank 1 ({node}) 0.02; "
        "start all machines with the same job file and options"
    )
    told = [line for text in texts for line in text.splitlines() if not line.startswith("[")]
    assert told == [expected]  # by one of them, whichever came first


# --- in a world ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """Listener of a rank: a file as long as it tells a cause."""

    path: Path

    def failed(self, failure: Failure) -> None:
        self.path.write_text(json.dumps(asdict(failure)))

    def echoes(self, first: str) -> None:
        self.path.unlink()


def run_and_tell(values: dict[str, Any], plugins: list[str], directory: Path) -> None:
    """A whole run as the command line makes it; how it failed is told to a file."""
    job, rank, size = job_of(values, plugins), dist.get_rank(), dist.get_world_size()
    place = ProcessEnv(rank, size, rank, size, "node-a", "torchrun")
    teller = FailureReporter(f"{describe_rank(job.mesh.sizes(), rank)} on node-a", Told(directory / f"told-{rank}"))
    with job.joined(place, teller) as topology:
        job.build(topology=topology).train()


def told_by(world: type[World], job: Path, directory: Path, plugins: list[str]) -> Failure:
    """Report of the only rank that did not just repeat another rank's."""
    with pytest.raises(RankFailedError):
        world(2, timeout=PATIENCE).run(run_and_tell, json.loads(job.read_text()), plugins, directory)
    (failure,) = [Failure(**json.loads(file.read_text())) for file in directory.glob("told-*")]
    return failure


@pytest.mark.thorough
def test_a_rank_whose_data_cannot_be_read_is_named_once_with_its_traceback(
    troubled: Write, world: type[World], tmp_path: Path
) -> None:
    job = troubled("raises")
    failure = told_by(world, job, tmp_path, [*PLUGINS, str(tmp_path / "trouble.py")])
    lines = failure.text.splitlines()
    assert lines[:2] == ["rank 1 (dp_shard=1) on node-a failed:", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: an unreadable sample"
    assert failure.exit_code == 1


@pytest.mark.thorough
def test_another_model_is_refused_by_all_ranks_and_told_once(
    small_job: Write, world: type[World], tmp_path: Path
) -> None:
    sections = {**FSDP2, "steps": 3, "export": False, "trackers": []}
    world(2).run(run_and_tell, json.loads(small_job(**sections).read_text()), PLUGINS, tmp_path)
    other = json.loads(small_job(**sections).read_text())
    other["model"]["num_layers"] = 3
    (tmp_path / "small.json").write_text(json.dumps(other))
    failure = told_by(world, tmp_path / "small.json", tmp_path, PLUGINS)
    where = tmp_path / "runs" / "small" / "checkpoints" / "step-00000003"
    assert failure.text == (
        f"error: {where} is of another model: model.num_layers: 2 there, 3 here; "
        "restore the job, or use another run.name"
    )
    assert failure.exit_code == 2


@pytest.mark.thorough
def test_a_directory_in_use_is_refused_by_all_ranks_and_told_once(
    small_job: Write, world: type[World], tmp_path: Path
) -> None:
    directory = tmp_path / "runs" / "small" / "checkpoints"
    store = CheckpointStore(directory)
    store.prepare()
    with store.opened():
        failure = told_by(world, small_job(**FSDP2), tmp_path, PLUGINS)
    assert failure.text == (
        f"error: {directory} is in use by another training run; stop it, or choose another run.name "
        f"(process {os.getpid()})"
    )
    assert failure.exit_code == 2


# --- under the launcher ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_rank_that_hangs_in_its_data_is_named_with_the_place_and_what_the_others_wait_in(
    troubled: Write, start: Start
) -> None:
    job = troubled("sleeps", timeouts={"step": 10}, steps=12)
    _, err = end(start("train", job, "--nproc", "2"), 1)
    node = ProcessEnv.from_environment({}).node
    report = err[err.index("error: no progress for ") :].splitlines()
    assert report[0].endswith(" s in phase 'step' (timeouts.step); the odd one out first")
    assert report[1].startswith(f"  rank 1 (dp_shard=1) on {node}: step 5: not in a collective, but at ")
    line = TROUBLE[: TROUBLE.index("time.sleep(600)")].count("\n") + 1
    assert report[1].endswith(f"/trouble.py:{line} (have_trouble)")
    assert report[2].startswith(f"  rank 0 (dp_shard=0) on {node}: step 5: waits in ")
    assert report[3] == f"stack of rank 1 (dp_shard=1) on {node}:"
    assert report[-1].strip() == "time.sleep(600)"  # the last thing printed
    assert "Traceback" not in err


@pytest.mark.slow  # test_checkpoint_ranks has it quicker, with a disk that is full in name only
def test_a_full_disk_on_one_rank_ends_the_run_and_harms_no_earlier_checkpoint(
    troubled: Write, start: Start, tmp_path: Path
) -> None:
    job = troubled("full disk", checkpoint={"every": 2, "tolerate_failures": 1}, steps=20)
    _, err = end(start("train", job, "--nproc", "2"), 1)
    directory = tmp_path / "runs" / "small" / "checkpoints"
    last = err.splitlines()[-1]
    full = re.fullmatch(rf"error: checkpoint {directory}/step-(\d+) could not be written: (.*)", last)
    assert full is not None, err
    assert full[2] == (
        "rank 1: [Errno 27] File too large; earlier checkpoints are unchanged; "
        "2 attempts in a row have failed (checkpoint.tolerate_failures)"
    )
    assert err.count("could not be written") == 1
    assert "Traceback" not in err
    assert not list(directory.glob(".*.tmp"))
    found = CheckpointStore(directory).newest(pytest.fail)
    assert found is not None
    assert 0 < found.step < int(full[1])


@pytest.mark.full
def test_after_ctrl_c_and_the_loss_of_a_shard_a_run_ends_as_one_that_torchrun_started(
    small_job: Write, start: Start, tmp_path: Path
) -> None:
    sections = {**FSDP2, "steps": 60, "logging": {"every": 1}, "checkpoint": {"every": 5}}
    command = ("train", small_job(**sections), "--nproc", "auto")
    first = start(*command)
    run = tmp_path / "runs" / "small"
    wait_for(lambda: len(list((run / "checkpoints").glob("step-*"))) >= 2, first)
    first.send_signal(signal.SIGINT)
    out, err = end(first, STOPPED)
    assert "SIGINT: stopped after step " in out
    assert json.loads((run / "stopped.json").read_text())["request"] == "SIGINT"
    assert "Traceback" not in err
    before, newest = sorted((run / "checkpoints").glob("step-*"))
    (newest / "tensors-00001.safetensors").unlink()
    out, _ = end(start(*command), 0)
    assert f"{newest} lacks tensors-00001.safetensors" in out
    assert out.count(f"resumed at step {int(before.name[5:])} of 60") == 1
    torchrun = ("--standalone", "--nproc-per-node", 2, "-m", "d9d_core", "train", small_job("straight", **sections))
    end(start(*torchrun, module="torch.distributed.run", OMP_NUM_THREADS="1"), 0)
    assert_same_weights(run, tmp_path / "runs" / "straight")


def assert_same_weights(*runs: Path) -> None:
    first, second = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
