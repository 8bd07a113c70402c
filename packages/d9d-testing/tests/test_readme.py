"""The example in the README is a test file that passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_passes_as_it_stands(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "test_acme.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", "test_acme.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " 12 passed" in done.stdout
