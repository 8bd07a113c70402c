"""What users and plugin authors rely on changes only on purpose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import d9d_engine.api
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.thorough
def test_the_public_surface_is_the_one_written_down() -> None:
    command = [sys.executable, "tools/public_surface.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", d9d_engine.api.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(d9d_engine.api, name).__name__ == name


def test_the_api_module_loads_without_torch() -> None:
    code = "import sys, d9d_engine.api; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
