"""Error of a failed run in one line, out of its output and its exit status."""

from __future__ import annotations

import signal

import pytest
from d9d_reports.runs.sweep import error_of

PROGRESS = "data: 3 documents\nstep 10/100  loss 2.5  1,000 tokens/s\n"


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        (PROGRESS, -signal.SIGKILL, "killed by SIGKILL; the system does that when memory runs out"),
        (PROGRESS, -signal.SIGSEGV, "killed by SIGSEGV"),
        (PROGRESS + "error: late\n", -signal.SIGTERM, "killed by SIGTERM"),
        (PROGRESS, -40, "killed by signal 40"),
        ("", -signal.SIGBUS, "killed by SIGBUS"),
        (PROGRESS, 3, "ended with exit status 3"),
        (PROGRESS + "error: the disk is full\nand more\n", 2, "the disk is full"),
        (PROGRESS + "Traceback (most recent call last):\n  File\nValueError: no\n", 1, "ValueError: no"),
    ],
)
def test_the_error_of_a_run_is_never_a_line_of_progress(text: str, code: int, error: str) -> None:
    assert error_of(text, code) == error
