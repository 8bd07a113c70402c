"""SIGTERM during the start-up of a rank that no launcher of d9d started."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, time
from d9d_engine.launch.process import running
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts

with Interrupts().noted() as interrupts, running(ProcessEnv(launcher="slurm"), {}, interrupts) as process:
    process.failed_elsewhere = lambda: FAILED
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""


@pytest.mark.parametrize(("failed", "status", "text"), [("False", 75, "SIGTERM: stopped"), ("True", 1, "")])
def test_sigterm_is_a_stop_unless_another_rank_has_failed(failed: str, status: int, text: str) -> None:
    script = SCRIPT.replace("FAILED", failed)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.startswith(text)) == (status, True)
    assert bool(done.stderr) == bool(text)
