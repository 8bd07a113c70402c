"""Plugins that are no workspace members, installed from wheels with ours in a fresh environment, work by name."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HELLO = ROOT / "examples" / "d9d-hello"
#: Third-party style distributions.
EXAMPLES = ("acme-memory", "acme-operations", "acme-tuning", "d9d-hello")
#: Packages that the examples' jobs need, and the kit of their tests.
OURS = (
    "d9d-core",
    "d9d-data",
    "d9d-engine",
    "d9d-inference",
    "d9d-moe",
    "d9d-nn",
    "d9d-optim",
    "d9d-pipeline",
    "d9d-qwen3",
    "d9d-testing",
    "d9d-verify",
    "d9d-weights",
)


@dataclass(frozen=True)
class Fresh:
    """An environment that holds wheels and nothing of this checkout."""

    directory: Path

    def run(self, *command: str, cwd: Path) -> str:
        """Run a command of the environment and return its output."""
        program = self.directory / "venv" / "bin" / command[0]
        return call(str(program), *command[1:], cwd=cwd)


def call(*command: str, cwd: Path) -> str:
    leaks = {"VIRTUAL_ENV", "UV_PYTHON", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "D9D_PLUGINS"}
    environ = {name: value for name, value in os.environ.items() if name not in leaks}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    directory = tmp_path_factory.mktemp("wheels")
    wheels, venv, pins = directory / "dist", directory / "venv", directory / "pins.txt"
    for name in OURS:
        call("uv", "build", "--wheel", "--quiet", "--package", name, "--out-dir", str(wheels), cwd=ROOT)
    for name in EXAMPLES:
        call("uv", "build", "--wheel", "--quiet", "--out-dir", str(wheels), str(ROOT / "examples" / name), cwd=ROOT)
    # The locked versions: they are in uv's cache, and a release of today changes nothing here.
    export = ("--no-hashes", "--no-emit-workspace", "--all-groups", "--format", "requirements.txt")
    pins.write_text(call("uv", "export", "--quiet", *export, cwd=ROOT))
    call("uv", "venv", "--quiet", "--python", sys.executable, str(venv), cwd=directory)
    built = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
    assert len(built) == len(OURS) + len(EXAMPLES)
    python = str(venv / "bin" / "python")
    call("uv", "pip", "install", "--quiet", "--python", python, "--constraint", str(pins), *built, cwd=directory)
    return Fresh(directory)


@pytest.mark.full
def test_our_packages_come_from_the_wheels(fresh: Fresh, tmp_path: Path) -> None:
    packages = [name.replace("-", "_") for name in (*OURS, *EXAMPLES)]
    script = (
        "import importlib, sys; print(*(importlib.import_module(name).__file__ for name in sys.argv[1:]), sep='\\n')"
    )
    files = fresh.run("python", "-c", script, *packages, cwd=tmp_path).splitlines()
    assert len(files) == len(packages)
    for file in files:
        assert Path(file).is_relative_to(fresh.directory / "venv")


@pytest.mark.full
def test_the_third_party_plugin_trains_by_name(fresh: Fresh, tmp_path: Path) -> None:
    fresh.run("d9d", "train", str(HELLO / "job.yaml"), cwd=tmp_path)
    run = tmp_path / "runs" / "hello"
    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    losses = [float(row["value"]) for row in rows if row["series"] == "loss"]
    assert [int(row["step"]) for row in rows if row["series"] == "loss"] == [1, 5, 10, 15, 20, 25, 30]
    assert losses[-1] < 0.85 * losses[0]
    assert not (run / "metrics.jsonl").exists(), "the job names its trackers, and jsonl is not among them"


@pytest.mark.full
def test_the_command_line_knows_where_the_names_come_from(fresh: Fresh, tmp_path: Path) -> None:
    listed = json.dumps(json.loads(fresh.run("d9d", "plugins", "list", "--json", cwd=tmp_path)))
    for name in ("d9d-hello", "smooth_lm", "csv"):
        assert f'"{name}"' in listed


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_plugins_own_tests_pass_there(fresh: Fresh, tmp_path: Path, name: str) -> None:
    # A copy, because pytest would load the conftest.py of this checkout, too.
    plugin = tmp_path / name
    shutil.copytree(ROOT / "examples" / name, plugin)
    fresh.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=plugin)


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_their_suites_pass_there_and_a_badge_says_so(fresh: Fresh, tmp_path: Path, name: str) -> None:
    said = fresh.run("d9d", "plugins", "conform", name, "--badge", "badge", cwd=tmp_path)
    assert f"{name} 0.1.0 conforms" in said
    facts = json.loads((tmp_path / "badge" / "conformance.json").read_text())
    assert {part["verdict"] for part in facts["components"]} <= {"passed", "declarations"}


@pytest.mark.full
def test_every_job_of_the_examples_runs(fresh: Fresh, tmp_path: Path) -> None:
    fresh.run("d9d", "plugins", "check", "--strict-plugins", cwd=tmp_path)
    for job in ("acme-memory/job", "acme-memory/attention", "acme-tuning/job", "acme-operations/job"):
        fresh.run("d9d", "train", str(ROOT / "examples" / f"{job}.yaml"), cwd=tmp_path)
    last = (tmp_path / "runs" / "memory" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["recall"] > 0.9
    fresh.run("d9d", "infer", str(ROOT / "examples" / "acme-memory" / "infer.yaml"), cwd=tmp_path)
    rows = list(csv.DictReader((tmp_path / "runs" / "attention_rows" / "output.csv").read_text().splitlines()))
    assert len(rows) == 100


def test_they_are_no_workspace_members() -> None:
    for name in EXAMPLES:
        assert name not in (ROOT / "pyproject.toml").read_text()
        assert name not in (ROOT / "uv.lock").read_text()
