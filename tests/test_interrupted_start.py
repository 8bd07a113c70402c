"""Ctrl-C at any moment of a start, of one process and of several: one line, exit status 130."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("delay", [0.12, 0.2, 0.3, 0.36, 0.4, 0.5, 0.8, 1.2])
def test_ctrl_c_before_training_is_one_line(small_job: Callable[..., Path], delay: float, processes: int) -> None:
    command = [sys.executable, "-m", "d9d_core", "train", str(small_job(steps=100_000))]
    several = ["--nproc", "2"] if processes > 1 else []
    with subprocess.Popen([*command, *several], stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        time.sleep(delay)  # of a busy machine, an earlier moment: each must do
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
    texts = "interrupted\n", "interrupted: during start-up; nothing was trained\n"
    assert (process.returncode, errors) in [(130, text) for text in texts]
