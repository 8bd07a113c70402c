"""Answers of engines' commands."""

from __future__ import annotations

import sys

import pytest
from d9d_core.errors import LaunchError
from d9d_core.launcher import answer_of

TOLD = {"missing": "install it", "silent": "is it running?"}
SPEAKS = "import os, sys; print(sys.stdin.read() + 'out'); print(os.environ.get('WORD'), file=sys.stderr); sys.exit(3)"


def test_status_output_and_errors_are_returned_and_the_command_has_no_input() -> None:
    found = answer_of([sys.executable, "-c", SPEAKS], seconds=60, environ={"WORD": "err"}, **TOLD)
    assert (found.returncode, found.stdout, found.stderr) == (3, "out\n", "err\n")
    joined = answer_of([sys.executable, "-uc", SPEAKS], seconds=60, environ={"WORD": "err"}, joined=True, **TOLD)
    assert joined.stdout == "out\nerr\n"


def test_a_missing_command_and_a_silent_one_are_told() -> None:
    with pytest.raises(LaunchError, match="^install it$"):
        answer_of(["no-such-command-of-an-engine"], seconds=60, **TOLD)
    with pytest.raises(LaunchError, match=r"^is it running\?$"):
        answer_of([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.3, **TOLD)
