"""The table of first-party names equals the names of the workspace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_known_plugins_is_up_to_date() -> None:
    command = [sys.executable, "tools/known_plugins.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
