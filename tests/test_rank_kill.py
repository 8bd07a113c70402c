"""Whichever rank is killed, and whenever: the job restarts by itself and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_engine.checkpoint import load as dcp_load
from d9d_engine.checkpoint import save as dcp_save
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_engine.supervision.failure import Failure
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.logs import read_log_without_times
from d9d_testing.processes import ranks_of
from d9d_testing.world import RankFailedError, World
from safetensors.torch import load_file
from torch import Tensor
from torch import distributed as dist

Write = Callable[..., Path]
PLUGINS = ["d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_qwen3.plugin"]
#: A run that has not come to the next kill after this many seconds hangs.
PATIENCE = 120


@dataclass(frozen=True)
class Kill:
    """When which rank dies.

    Attributes:
        rank: which one.
        moment: ``start-up``, right after the processes exist; ``training``, once a step is logged; ``saving``, when the
            next checkpoint after that is being written.
        step: to be logged before.
        delay: seconds after all that.
    """

    rank: int
    moment: str
    step: int
    delay: float


class Launch:
    """A job under ``d9d train --nproc``, as one sees it from outside."""

    def __init__(self, process: subprocess.Popen[str], ranks: int, run: Path) -> None:
        self.process = process
        self.seen: set[int] = set()
        self._ranks = ranks
        self._run = run

    def kill(self, kill: Kill) -> None:
        """Wait for all processes of a new attempt, then for the moment, and kill."""
        workers = self._wait_for(self._new_workers)
        self.seen |= set(workers.values())
        began = time.time_ns()
        if kill.moment != "start-up":
            self._wait_for(lambda: self._logged_since(began) >= kill.step)
        if kill.moment == "saving":
            self._wait_for(lambda: any((self._run / "checkpoints").glob(".step-*.tmp")))
        time.sleep(kill.delay)
        os.kill(workers[kill.rank], signal.SIGKILL)

    def _wait_for(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert self.process.poll() is None, "the run has ended"
            assert time.monotonic() < deadline, "the run makes no progress"
            time.sleep(0.002)
        return found

    def _new_workers(self) -> dict[int, int] | None:
        """Rank -> process, once all of them are others than before."""
        workers = {rank: pid for rank, pid in ranks_of(self.process.pid).items() if pid not in self.seen}
        return workers if len(workers) == self._ranks else None

    def _logged_since(self, moment: int) -> int:
        """The last step in the log, 0 if that was not written since."""
        file = self._run / "metrics.jsonl"
        if not file.exists() or file.stat().st_mtime_ns < moment:
            return 0
        return int([0, *re.findall(r'^{"step": (\d+)', file.read_text(), re.MULTILINE)][-1])


@contextmanager
def launched(job: Path, ranks: int, run: Path) -> Iterator[Launch]:
    command = [sys.executable, "-m", "d9d_core", "train", str(job), "--nproc", str(ranks), "--max-restarts", "50"]
    with (
        job.with_suffix(".err").open("w") as err,
        subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=err) as process,
    ):
        try:
            yield Launch(process, ranks, run)
        finally:
            process.kill()


def campaign(ranks: int, kills: int, steps: int, seed: int) -> list[Kill]:
    """Kills of random ranks at random moments, in the order of the steps that must be logged before."""
    choice = random.Random(seed)
    moments = [("start-up", "training", "saving")[number % 3] for number in range(kills)]
    choice.shuffle(moments)
    logged = sorted(choice.randrange(1, steps - 20) for _ in moments)
    longest = {"start-up": 5.0, "training": 0.2, "saving": 0.02}
    return [
        Kill(choice.randrange(ranks), moment, step, choice.uniform(0, longest[moment]))
        for moment, step in zip(moments, logged, strict=True)
    ]


def suffer(write: Write, world: type[World], runs: Path, layout: dict[str, Any], steps: int, kills: list[Kill]) -> None:
    """Run a job with and without the kills; nothing may differ."""
    sections = {"steps": steps, "checkpoint": {"every": 5}, "logging": {"every": 1}, **layout}
    sections["batch"] = {"size": 4, "microbatch": 1}
    sections["trackers"] = [{"name": "jsonl", "picture": False}]
    straight, broken = write("straight", **sections), write("broken", **sections)
    ranks = 2 if len(layout["mesh"]) == 1 else 4
    world(ranks, timeout=PATIENCE).run(train, json.loads(straight.read_text()))
    with launched(broken, ranks, runs / "broken") as launch:
        for kill in kills:
            launch.kill(kill)
        launch.process.wait(PATIENCE)
    told = broken.with_suffix(".err").read_text()
    assert launch.process.returncode == 0, told
    causes = re.findall(r"^rank (\d+) \(.*\) on .* was killed by SIGKILL", told, re.MULTILINE)
    assert list(map(int, causes)) == [kill.rank for kill in kills]
    assert "Traceback" not in told
    assert not any(Path(f"/proc/{pid}").exists() for pid in launch.seen)
    compare(runs / "straight", runs / "broken", steps)


def train(values: dict[str, Any]) -> None:
    """The undisturbed run, on every rank of a world."""
    job = job_of(values, PLUGINS)
    job.build(lambda _note: None, topology_here(job)).train()


def compare(straight: Path, broken: Path, steps: int) -> None:
    expected, found = saved(straight, steps), saved(broken, steps)
    assert {name.partition("/")[0] for name in expected} == {"model", "optimizer", "metrics"}
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert read_log_without_times(broken) == read_log_without_times(straight)
    weights = [load_file(run / "model" / "model.safetensors") for run in (straight, broken)]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    assert not list((broken / "checkpoints").glob(".*.tmp"))


def saved(run: Path, steps: int) -> dict[str, Tensor]:
    """All tensors of the last checkpoint, whole."""
    checkpoint = CheckpointStore(run / "checkpoints").newest(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == steps
    table = checkpoint.manifest["tensors"].items()
    whole = {key: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for key, entry in table}
    checkpoint.load_into(whole)
    return whole


@pytest.mark.full
def test_two_killed_ranks_change_nothing(small_job: Write, world: type[World], tmp_path: Path) -> None:
    layout = {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]}
    # The main rank while it writes, the other one while it waits for it in a step.
    kills = [Kill(0, "saving", 8, 0.004), Kill(1, "training", 22, 0.05)]
    suffer(small_job, world, tmp_path / "runs", layout, 40, kills)


def lose_a_rank(directory: Path, when: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = CheckpointStore(directory / "checkpoints", topology=Topology(rank=rank, world_size=size))
    store.save(1, {"w": torch.ones(3)}, {}, {})
    if rank == 1:
        target, name = (dcp_save, "write_tensors") if when == "saving" else (dcp_load, "TensorFile")
        setattr(target, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        if when == "saving":
            store.save(2, {"v": torch.ones(3), "w": torch.ones(3)}, {}, {})
        else:
            found = store.newest(print)
            assert found is not None
            found.load_into({"w": torch.ones(3)})
    except Exception as error:
        (directory / f"{rank}").write_text(json.dumps(asdict(Failure.of(error))))
        raise


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["saving", "loading"])
def test_a_rank_that_dies_is_no_error_of_the_checkpoint(world: type[World], tmp_path: Path, when: str) -> None:
    with pytest.raises(RankFailedError):
        world(2).run(lose_a_rank, tmp_path, when)
    told = json.loads((tmp_path / "0").read_text())
    # Exit status 2 would keep the job from starting again, and the cause lies in the other rank.
    assert (told["exit_code"], told["second_hand"]) == (1, True), told["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]},
        {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "parallel": ["hsdp"]},
    ],
    ids=["fsdp 2", "hsdp 2x2"],
)
def test_twenty_killed_ranks_change_nothing(
    small_job: Write, world: type[World], tmp_path: Path, layout: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = 2 if len(layout["mesh"]) == 1 else 4
    kills = campaign(ranks, kills=20, steps=300, seed=ranks)
    began = time.monotonic()
    suffer(small_job, world, tmp_path / "runs", layout, 300, kills)
    with capsys.disabled():
        moments = dict(Counter(kill.moment for kill in kills))
        print(f"\n{ranks} ranks, killed {moments}, {time.monotonic() - began:.0f} s")
    assert {kill.rank for kill in kills} == set(range(ranks))
