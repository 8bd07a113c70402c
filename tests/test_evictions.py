"""A cluster that evicts a job while a checkpoint is written: SIGKILL, or SIGTERM and SIGKILL after the grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

#: Plugin by which each rank waits after writing its file of one save, before the checkpoint is complete.
SLOW = """
import os, time
from pathlib import Path

D9D_API = 2
if "SLOW_SAVE" in os.environ:
    from d9d_engine.checkpoint import save

    write, saves = save.write_tensors, []

    def slow(*given, **more):
        written = write(*given, **more)
        saves.append(1)
        if len(saves) == int(os.environ["SLOW_SAVE"]):
            Path(f"{__file__}.rank{os.environ['RANK']}").touch()
            time.sleep(600)
        return written

    save.write_tensors = slow
"""
D9D = [sys.executable, "-m", "d9d_core", "train"]


def evict(command: list[str], environ: dict[str, str], writing: list[Path], first: int) -> None:
    """Start a job, and kill all its processes while a checkpoint is written."""
    job = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not all(file.exists() for file in writing):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        everyone = [job.pid, *map(int, children)]
        for number in dict.fromkeys((first, signal.SIGKILL)):
            for process in everyone:
                os.kill(process, number)
            if number != signal.SIGKILL:
                time.sleep(1)  # the grace period, too short for the save
    finally:
        job.kill()
        job.wait()


@pytest.mark.full
@pytest.mark.parametrize(
    ("save", "first", "address"),
    [(1, signal.SIGKILL, False), (1, signal.SIGTERM, True), (2, signal.SIGTERM, False), (2, signal.SIGKILL, True)],
)
def test_an_eviction_during_a_save_costs_the_steps_since_the_last_checkpoint_only(
    small_job: Callable[..., Path], tmp_path: Path, save: int, first: int, address: bool
) -> None:
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW)
    place = {"dir": f"file://{tmp_path}/saved"} if address else {}
    layout = {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]}
    fields = {"steps": 6, "checkpoint": {"every": 2, **place}, "plugins": {"files": [str(plugin)]}, **layout}
    command = [*D9D, str(small_job("run", **fields)), "--nproc", "2"]
    writing = [Path(f"{plugin}.rank{rank}") for rank in (0, 1)]
    evict(command, {**os.environ, "SLOW_SAVE": str(save)}, writing, first)
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert resumed.returncode == 0, resumed.stderr
    left = f"step-{2 * save:08d} is incomplete, because a process was killed during the save, and not used; "
    found = "no earlier checkpoint exists" if save == 1 else "step-00000002 is complete"
    assert left + found in resumed.stdout
    assert ("resumed at step 2 of 6" in resumed.stdout) == (save == 2)
    whole = [*D9D, str(small_job("whole", **{**fields, "checkpoint": {}})), "--nproc", "2"]
    subprocess.run(whole, check=True, capture_output=True, timeout=120)
    ours, theirs = (load_file(tmp_path / "runs" / name / "model" / "model.safetensors") for name in ("run", "whole"))
    assert [name for name in theirs if not theirs[name].equal(ours[name])] == []
    assert not list(tmp_path.rglob(".*.tmp"))
