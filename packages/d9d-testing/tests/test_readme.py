"""The examples in the README are test files that pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.full
def test_the_examples_pass_as_they_stand(tmp_path: Path) -> None:
    first, *suites = examples()
    (tmp_path / "test_acme.py").write_text(first)
    for number, example in enumerate(suites):
        (tmp_path / f"test_suite{number}.py").write_text(f"import torch\n{example}")
    assert len(suites) == 9
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 12 + len(suites), done.stdout


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
