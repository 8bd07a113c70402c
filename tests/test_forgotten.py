"""Objects that a notebook forgets end: threads and processes of trainers, inferences and the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

MakeJob = Callable[..., Path]
SCRIPT = '''
import gc, json, os, sys, threading, time, weakref
from pathlib import Path
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob

def children():
    """Processes that this one started, but for the one by which multiprocessing cleans up, which ends with this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            words = (process / "cmdline").read_text()
        except OSError:
            continue
        if parent == os.getpid() and words and "resource_tracker" not in words:
            found.append(int(process.name))
    return found

def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("d9d-")]

def step_by_hand(job):
    trainer = job.build(lambda _: None)
    for step in range(2):
        trainer.step(step, trainer.prefetcher.next())
    return trainer

def take_by_hand(job):
    inference = InferenceJob.over(job, task="perplexity", limit=2, too_long="cut").build(lambda _: None)
    inference.prefetcher.next()
    return inference

def fail(job):
    class Fails:
        def subscriptions(self):
            from d9d_core.events import StepEnds
            return [(StepEnds, self.fail)]
        def fail(self, event):
            raise ValueError("a mistake in a cell")
    try:
        job.build(lambda _: None, observers=[Fails()]).train()
    except ValueError:
        pass

def wait_until_forgotten():
    end = time.monotonic() + 20
    while children() or threads():
        assert time.monotonic() < end, (children(), threads())
        gc.collect()
        time.sleep(0.05)

if __name__ == "__main__":
    job = Job.load(sys.argv[1])
    Job.load(sys.argv[1], overrides=["data.workers=0"]).build(lambda _: None).train()
    used = [step_by_hand(job), take_by_hand(job)]
    assert (len(children()), threads()) == (2, ["d9d-prefetch"] * 2)
    forgotten = [*map(weakref.ref, used)]
    del used
    wait_until_forgotten()
    assert [one() for one in forgotten] == [None, None]
    fail(Job.load(sys.argv[1], overrides=["run.name=failing"]))
    wait_until_forgotten()
    kept = step_by_hand(job)  # until the interpreter ends
    print(json.dumps([os.getpid(), *children()]))
'''


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_nothing_is_left_of_what_is_forgotten(small_job: MakeJob, tmp_path: Path) -> None:
    documents = {"name": "documents", "sources": [str(tmp_path / "corpus")], "sequence_length": 64, "workers": 1}
    job = small_job(data=documents, steps=2, metrics=[], trackers=[], lr_schedule=None)
    script = tmp_path / "forgets.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, job], check=False, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    pids = json.loads(done.stdout.splitlines()[-1])
    assert len(pids) == 2
    end = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, "processes outlive the one that started them"
        time.sleep(0.05)
