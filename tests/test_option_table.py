"""The table of options equals the options of the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/option_table.py", "--check"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_the_table_of_options_is_up_to_date() -> None:
    done = check()
    assert done.returncode == 0, done.stderr


def test_it_says_that_verify_takes_overrides_and_that_diff_takes_no_plugins() -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    rows = page.partition("<!-- options: begin")[2].partition("<!-- options: end")[0].splitlines()
    (overrides,) = [row for row in rows if row.startswith("| `--set FIELD=VALUE`")]
    (plugin,) = [row for row in rows if row.startswith("| `--plugin FILE`")]
    assert "`verify`" in overrides
    assert re.search(r"\| all but .*`state diff`", plugin)
