"""The examples in the README are test files that pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_passes_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "test_acme.py").write_text(examples()[0])
    done = pytest_in(tmp_path, "test_acme.py")
    assert "\n12 passed" in done, done


@pytest.mark.thorough
def test_the_examples_of_suites_pass_as_they_stand(tmp_path: Path) -> None:
    suites = examples()[1:]
    for number, example in enumerate(suites):
        (tmp_path / f"test_suite{number}.py").write_text(f"import torch\n{example}")
    assert len(suites) == 7
    done = pytest_in(tmp_path, *(f"test_suite{number}.py" for number in range(len(suites))))
    assert re.search(r"\d\d passed", done), done


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def pytest_in(directory: Path, *files: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout
