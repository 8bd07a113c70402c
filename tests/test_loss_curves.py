"""The comparison of loss curves over seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "bench" / "loss_curves.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = util.spec_from_file_location("loss_curves", SCRIPT)
    assert spec
    assert spec.loader
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_differences_are_of_pairs_and_noise_is_of_seeds(script: ModuleType) -> None:
    base = [[3.0] * 20, [5.0] * 20]
    result = script.compared({"fast": base, "other": [[3.0] * 20, [5.5] * 20]}, [10, 20])
    assert result["noise"] == pytest.approx(2**0.5)
    assert result["settings"]["fast"]["losses"] == [4.0, 4.0]
    other = result["settings"]["other"]
    assert other["differences"] == [0.25, 0.25]
    assert other["over_noise"] == pytest.approx(0.25 / (2**0.5 / 2**0.5))
    assert "other against fast: at most +0.2500, 0.25 of the noise" in script.table_of(result)


def test_the_largest_difference_keeps_its_sign_and_one_seed_has_no_noise(script: ModuleType) -> None:
    result = script.compared({"fast": [[2.0] * 20], "other": [[2.0] * 10 + [1.0] * 10]}, [10, 20])
    assert result["settings"]["other"]["largest"] == -1.0
    assert "noise" not in result
    assert "noise" not in script.table_of(result)


def test_a_loss_is_the_mean_of_the_steps_up_to_it(script: ModuleType) -> None:
    losses = [float(step) for step in range(1, 31)]
    assert script.smooth(losses, 20) == sum(range(11, 21)) / 10
    assert script.smooth(losses, 2) == 1.5


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    settings = ["reference", "fp8-rowwise"]
    command = [sys.executable, str(SCRIPT), "--moe", "--steps", "12", "--seeds", "2", "--device", "cpu"]
    command += ["--folder", str(tmp_path), "--settings", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "moe-autocast.json").read_text())
    assert list(result["curves"]) == settings
    assert {len(curve) for found in result["curves"].values() for curve in found} == {12}
    assert result["noise"] > 0
    assert result["settings"]["fp8-rowwise"]["largest"] != 0
    assert (tmp_path / "moe-autocast.svg").exists()
