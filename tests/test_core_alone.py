"""d9d-core without torch: all that a CI for job files, or an author of a tracker, needs to install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
MIB = 2**20


def needed(name: str) -> dict[str, Distribution]:
    """A distribution and everything that it requires without extras, by normalised name."""
    found: dict[str, Distribution] = {}
    waiting = [name]
    while waiting:
        current = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if current in found:
            continue
        found[current] = distribution(current)
        for line in found[current].requires or ():
            requirement, _, marker = line.partition(";")
            if not re.search(r"extra|python_version|sys_platform|platform_system", marker):
                waiting.append(re.split(r"[\s<>=!~\[(]", requirement.strip())[0])
    return found


def site_of(directory: Path, members: list[Path]) -> dict[str, str]:
    """Environment of a Python that sees d9d-core's dependencies, and these members as if installed; nothing else."""
    site = directory / "site"
    site.mkdir()
    for installed in needed("d9d-core").values():
        for file in {Path(str(path)).parts[0] for path in installed.files or () if not str(path).startswith("..")}:
            source = Path(str(installed.locate_file(file)))
            if source.exists() and source.name != "__pycache__" and not (site / file).exists():
                (site / file).symlink_to(source)
    for member in members:
        for info in Path(str(distribution(member.name).locate_file("."))).glob(
            f"{member.name.replace('-', '_')}-*.dist-info"
        ):
            if not (site / info.name).exists():
                (site / info.name).symlink_to(info)
    paths = [site, *(member / "src" for member in members)]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PATH": os.environ["PATH"], "HOME": str(directory)}


def run(environ: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-S", "-m", "d9d_core", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return site_of(tmp_path_factory.mktemp("alone"), [ROOT / "packages" / "d9d-core"])


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    members = sorted(path.parent for path in ROOT.glob("p*/*/pyproject.toml") if path.parent.name != "d9d-testing")
    return site_of(tmp_path_factory.mktemp("without"), members)


def test_it_installs_less_than_40_mib() -> None:
    files = [path for found in needed("d9d-core").values() for path in found.files or ()]
    size = sum(Path(str(path.locate())).stat().st_size for path in files if Path(str(path.locate())).exists())
    sources = sum(path.stat().st_size for path in (ROOT / "packages" / "d9d-core" / "src").rglob("*.py"))
    assert size + sources < 40 * MIB
    assert not {"torch", "numpy", "matplotlib"} & needed("d9d-core").keys()


def test_torch_is_out_of_reach_in_these_tests(alone: dict[str, str]) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'd9d_engine', 'd9d_nn') if u.find_spec(n)])"
    done = subprocess.run([sys.executable, "-S", "-c", code], env=alone, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["doctor"], ["--version"]])
def test_commands_of_core_answer(alone: dict[str, str], arguments: list[str]) -> None:
    status, out, err = run(alone, *arguments)
    assert (status, err) == (0, "")
    assert out or arguments == ["doctor"]


def test_the_schema_lists_no_absent_names(alone: dict[str, str]) -> None:
    status, out, _ = run(alone, "schema")
    assert status == 0
    assert json.loads(out)["properties"]["steps"]


@pytest.mark.thorough
def test_what_is_missing_is_named_with_its_install_line(alone: dict[str, str]) -> None:
    status, _, err = run(alone, "check", str(QUICKSTART / "job.yaml"))
    assert status == 2
    for name, package in (("qwen3", "d9d-qwen3"), ("text", "d9d-data"), ("adamw", "d9d-optim")):
        assert re.search(rf"'{name}' comes from {package}; install it with: pip install {package}$", err, re.MULTILINE)
    homes = {"train": "engine", "explain": "engine", "state": "weights", "plan": "planner", "infer": "inference"}
    for command, home in (homes | {"runs": "reports", "verify": "verify", "profile": "planner"}).items():
        assert run(alone, command, "job.yaml")[2] == (
            f"error: command '{command}' comes from d9d-{home}; install it with: pip install d9d-{home}\n"
        )
    for second, home in (("job", "data"), ("plugin", "testing")):
        assert run(alone, "new", second)[2] == (
            f"error: command 'new {second}' comes from d9d-{home}; install it with: pip install d9d-{home}\n"
        )


@pytest.mark.thorough
@pytest.mark.parametrize("job", ["job.yaml", "moe.yaml", "pipeline.yaml"])
def test_jobs_are_checked_as_far_as_they_need_no_tensors(without_torch: dict[str, str], job: str) -> None:
    status, out, err = run(without_torch, "check", str(QUICKSTART / job))
    assert (status, err) == (0, "")
    assert "ok: names, values, capabilities, mesh and schedule" in out
    assert "not checked (to check it: pip install torch): Model, strategies and kernels, without a GPU." in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("optimizer.lrr=1", "optimizer.lrr: not a field of 'adamw'"),
        ("mesh.dp_shard=2", "mesh.dp_shard is 2, but no component of the job uses that axis"),
        ("kernels.attention=spda", "kernels.attention: unknown kernel 'attention.spda'"),
        ("mesh.ep=2", "2 ranks that split the experts must cover whole inner axes"),
    ],
)
def test_wrong_jobs_are_refused(without_torch: dict[str, str], override: str, complaint: str) -> None:
    status, _, err = run(without_torch, "check", str(QUICKSTART / "job.yaml"), "--set", override)
    assert status == 2
    assert complaint in err


@pytest.mark.thorough
def test_commands_that_need_torch_say_so(without_torch: dict[str, str]) -> None:
    status, out, _ = run(without_torch, "--help")
    assert status == 0
    assert " train " in out
    message = "error: command 'train' (d9d-engine 0.1.0) needs torch; install it with: pip install torch\n"
    assert run(without_torch, "train", "job.yaml")[2] == message
    status, out, _ = run(without_torch, "doctor")
    assert status == 1
    assert "no  torch: torch is not installed; pip install torch" in out
