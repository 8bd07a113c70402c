"""What users and plugin authors rely on changes only on purpose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.thorough
def test_the_public_surface_is_the_one_written_down() -> None:
    command = [sys.executable, "tools/public_surface.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_jobs_load_without_torch() -> None:
    code = "import sys, d9d_engine.job; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
