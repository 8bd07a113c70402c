"""A made-up minor release of d9d-core breaks no plugin, and its deprecated name is told to authors and users."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from d9d_testing.scaffold.package import write_plugin

from tests.test_api_policy import TOGETHER, VERSION
from tests.test_frozen_plugins import FROZEN, put_on_path
from tests.test_hello_wheel import HELLO, OURS, call

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[1]
NEXT = f"{VERSION.major}.{VERSION.minor + 1}"
#: Appended to a module of the made-up release: a name that has moved.
MOVED = """
from d9d_core.deprecation import Deprecated, DeprecatedNames
__getattr__ = DeprecatedNames(
    __name__, {"OldInputs": Deprecated("d9d_core.task:StageInputs", ends="99.0", last_api=2)}
)
"""
TEXT = "uses d9d_core.task.OldInputs, which ends in release 99.0 of d9d; use d9d_core.task.StageInputs"


@dataclass(frozen=True)
class Site:
    """Directory in front of the installed packages, with a made-up release of d9d-core and third-party plugins."""

    directory: Path

    def run(self, *words: str, status: int = 0) -> str:
        """Run ``d9d`` in a new process and return its output."""
        leaks = {"PYTHONPATH", "D9D_PLUGINS", "PYTHONWARNINGS"}
        environ = {name: value for name, value in os.environ.items() if name not in leaks}
        environ |= {"PYTHONPATH": str(self.directory), "COLUMNS": "500"}
        command = [sys.executable, "-m", "d9d_core", *words]
        done = subprocess.run(command, cwd=self.directory, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == status, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


def next_core(directory: Path) -> None:
    """Write d9d-core of the next minor release: a newer API, and a name that has moved."""
    core = directory / "d9d_core"
    shutil.copytree(ROOT / "packages/d9d-core/src/d9d_core", core, ignore=shutil.ignore_patterns("__pycache__"))
    hooks = core / "registry/hooks.py"
    newer, count = re.subn(
        r"MappingProxyType\(\{(.*)\}\)", rf'MappingProxyType({{\1, 3: "{NEXT}"}})', hooks.read_text()
    )
    assert count == 1
    hooks.write_text(newer)
    with (core / "task.py").open("a") as file:
        file.write(MOVED)
    table = core / "registry/api.json"
    api = json.loads(table.read_text())
    old = {"target": "d9d_core.task:StageInputs", "ends": "99.0", "last_api": 2}
    table.write_text(json.dumps(api | {"deprecated": {"d9d_core.task": {"OldInputs": old}}}))
    info = directory / f"d9d_core-{NEXT}.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: d9d-core\nVersion: {NEXT}.0\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    directory = tmp_path_factory.mktemp("next")
    next_core(directory)
    for folder in FROZEN.glob("api_*"):
        put_on_path(folder, directory)
    # A plugin that was written for this release uses a name that has moved since.
    made = directory / "made"
    write_plugin(made, "acme-focal", "task")
    task = made / "src/acme_focal/task.py"
    task.write_text(task.read_text().replace("import StageInputs", "import OldInputs as StageInputs"))
    put_on_path(made, directory)
    (directory / "job.yaml").write_bytes((made / "job.yaml").read_bytes())
    return Site(directory)


def test_plugins_for_the_earlier_api_load_and_pass_their_checks(site: Site) -> None:
    assert site.run("--version") == f"d9d-core {NEXT}.0\n"
    assert site.run("plugins", "check", "frozen-api-2", "--strict-plugins").endswith("19 records checked, 0 problems\n")
    assert "model:blocks" in site.run("explain", str(FROZEN / "api_2/train.yaml"))


def test_the_check_names_the_replacement_and_refuses_the_old_name_on_request(site: Site) -> None:
    line = f"acme-focal 0.1.0: acme_focal/task.py:\\d+ {TEXT}\n"
    assert re.search(
        f"^--  {line}1 records checked, 0 problems$", site.run("plugins", "check", "acme-focal"), re.MULTILINE
    )
    strict = site.run("plugins", "check", "acme-focal", "--strict-plugins", status=1)
    assert re.search(f"^no  {line}1 records checked, 1 problems$", strict, re.MULTILINE)


@pytest.mark.parametrize(
    "options", [(), ("--nproc", "2", "--set", "run.name=two")], ids=["one process", "two processes"]
)
def test_training_prints_one_line_about_the_old_name(site: Site, options: tuple[str, ...]) -> None:
    out = site.run("train", "job.yaml", "--set", "steps=2", *options)
    assert out.count(f"acme-focal 0.1.0 {TEXT}") == 1
    assert re.search(r"acme_focal/task.py:\d+: DeprecatedNameWarning: acme-focal 0.1.0 uses", out)
    assert "finished 2 steps" in out


def test_strict_plugins_refuse_to_train_with_the_old_name(site: Site) -> None:
    out = site.run("train", "job.yaml", "--strict-plugins", status=2)
    assert re.search(f"error: --strict-plugins: acme-focal 0.1.0: acme_focal/task.py:\\d+ {TEXT}", out)


def bumped(member: str, directory: Path) -> Path:
    """Copy of a member with the version and the requirements of the next minor release."""
    (source,) = ROOT.glob(f"p*/{member}")
    copy = directory / member
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    project = copy / "pyproject.toml"
    text = project.read_text().replace(f'version = "{VERSION}"', f'version = "{NEXT}.0"')
    bounds = f">={NEXT},<{VERSION.major}.{VERSION.minor + 2}"
    project.write_text(text.replace(f">={VERSION.major}.{VERSION.minor},<{NEXT}", bounds))
    return copy


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run a command of an environment with the next release of the foundation and plugins of this release."""
    directory = tmp_path_factory.mktemp("installed")
    wheels, venv, pins = directory / "dist", directory / "venv", directory / "pins.txt"
    made = directory / "acme-metric"
    write_plugin(made, "acme-metric", "metric")
    sources: Mapping[str, Path] = {
        name: bumped(name, directory) if name in TOGETHER else next(ROOT.glob(f"p*/{name}")) for name in OURS
    }
    for source in (*sources.values(), HELLO, FROZEN / "api_2", made, next(ROOT.glob("plugins/d9d-pipeline"))):
        call("uv", "build", "--wheel", "--quiet", "--out-dir", str(wheels), str(source), cwd=directory)
    export = ("--no-hashes", "--no-emit-workspace", "--all-groups", "--format", "requirements.txt")
    pins.write_text(call("uv", "export", "--quiet", *export, cwd=ROOT))
    call("uv", "venv", "--quiet", "--python", sys.executable, str(venv), cwd=directory)
    where = ("--python", str(venv / "bin/python"), "--constraint", str(pins))
    call("uv", "pip", "install", "--quiet", *where, *map(str, sorted(wheels.glob("*.whl"))), cwd=directory)
    return lambda *words, cwd: call(str(venv / "bin" / words[0]), *words[1:], cwd=cwd)


def test_plugins_of_this_release_install_and_train_with_the_next_one(fresh: Callable[..., str], tmp_path: Path) -> None:
    versions = "from importlib.metadata import version as v; print(v('d9d-core'), v('d9d-moe'), v('d9d-hello'))"
    assert fresh("python", "-c", versions, cwd=tmp_path) == f"{NEXT}.0 {VERSION} 0.1.0\n"
    for name, records in (("d9d-hello", 2), ("acme-metric", 1), ("frozen-api-2", 19)):
        checked = fresh("d9d", "plugins", "check", name, "--strict-plugins", cwd=tmp_path)
        assert checked.endswith(f"{records} records checked, 0 problems\n")
    fresh("d9d", "train", str(HELLO / "job.yaml"), "--strict-plugins", "--set", "steps=5", cwd=tmp_path)
    fresh("d9d", "train", str(FROZEN / "api_2/train.yaml"), "--set", "steps=5", cwd=tmp_path)
    assert (tmp_path / "runs/frozen/lines.txt").read_text().startswith("1 loss=")
