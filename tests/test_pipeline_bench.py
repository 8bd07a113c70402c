"""The comparison of pipeline schedules with torch's own computes the same gradients on both sides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
TINY = {
    "device": "cpu", "schedules": "1f1b,zb1p", "rounds": 1, "steps": 1, "times": 1, "layers": 4, "hidden": 64,
    "head": 16, "vocabulary": 128, "sequence": 64, "microbatches": 4,
}  # fmt: skip


@pytest.mark.full
def test_both_sides_compute_the_same_gradients() -> None:
    options = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / "tools" / "bench" / "pipeline.py"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" ") for line in done.stdout.splitlines() if line.startswith(("1f1b ", "zb1p "))]
    found = {name: json.loads(values) for name, _, values in lines}
    assert list(found) == ["1f1b", "zb1p"]
    assert all(values["gradients 1-cos"] < 1e-6 for values in found.values())
    assert all(values["torch ms"] > 0 for values in found.values())
