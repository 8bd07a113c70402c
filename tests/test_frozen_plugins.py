"""The frozen plugin of each supported API loads, passes its check, trains, resumes and infers, unchanged."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from d9d_core.registry import hooks
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job

FROZEN = Path(__file__).parent / "frozen_plugins"
#: Folder -> checksum of its files. A checksum never changes: README.md in that directory says why.
CHECKSUMS = {"api_2": "f1a5f526208570951f3523a5a27a7ae316ba99291ea3f504683ded1e58beabec"}


def checksum(folder: Path) -> str:
    """Sha256 over the names and contents of the files, sorted by name."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    parts = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def put_on_path(folder: Path, site: Path) -> str:
    """Make a directory for sys.path with the plugin and its metadata, as an installation has them; return its name."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name = project["name"].replace("-", "_")
    (site / name).symlink_to(folder / "src" / name)
    info = site / f"{name}-{project['version']}.dist-info"
    info.mkdir()
    lines = [f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {each}" for each in project["dependencies"]]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
    points = "".join(f"{key} = {value}\n" for key, value in project["entry-points"]["d9d"].items())
    (info / "entry_points.txt").write_text(f"[d9d]\n{points}")
    return str(project["name"])


@pytest.fixture(params=sorted(CHECKSUMS))
def plugin(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, str]]:
    """Folder and distribution of a frozen plugin that is on the path, from a working directory with its jobs."""
    folder = FROZEN / request.param
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    name = put_on_path(folder, site)
    for job in folder.glob("*.yaml"):
        (work / job.name).write_bytes(job.read_bytes())
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.delenv("D9D_PLUGINS", raising=False)
    monkeypatch.chdir(work)
    yield folder, name
    for module in list(sys.modules):
        if module.partition(".")[0] == name.replace("-", "_"):
            del sys.modules[module]


def d9d(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "d9d_core", *words], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_no_frozen_plugin_changes() -> None:
    assert {folder.name: checksum(folder) for folder in FROZEN.iterdir() if folder.is_dir()} == CHECKSUMS


def test_a_change_of_a_frozen_plugin_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = checksum(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = checksum(tmp_path)
    (tmp_path / "b.py").write_text("x = 2")
    assert len({before, renamed, checksum(tmp_path)}) == 3


def test_each_supported_api_has_its_frozen_plugin() -> None:
    assert {f"api_{number}" for number in hooks.API_RELEASES} == set(CHECKSUMS)


def test_it_loads_with_a_record_of_every_hook_of_its_api(plugin: tuple[Path, str]) -> None:
    folder, name = plugin
    registry = discover(PluginPolicy(allow=frozenset({name})))
    assert registry.problems == ()
    own = [entry for entry in registry.entries() if entry.origin.distribution == name]
    assert {entry.origin.api for entry in own} == {int(folder.name.removeprefix("api_"))}
    kinds = {"api_2": 19}  # hooks that came later are in the plugin of the next API
    assert len({entry.kind.hook for entry in own}) == kinds[folder.name]


@pytest.mark.thorough
def test_it_trains_resumes_is_tuned_and_infers(plugin: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    from d9d_inference.job import InferenceJob

    _, name = plugin
    registry = Registry.of(importlib.import_module(f"{name.replace('-', '_')}.plugin"))
    for steps in (20, 60):  # the subscriber ends the run after 40 steps
        Job.load("train.yaml", registry=registry, overrides=[f"steps={steps}"]).build().train()
    lines = Path("runs/frozen/lines.txt").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == [1, 10, 20, 30, 40]
    losses = [float(line.split()[1].removeprefix("loss=")) for line in lines]
    assert losses[-1] < 0.3 * losses[0]
    assert Path("runs/frozen/status.txt").read_text() == "finished"
    assert "frozen_count saw 40 steps" in capsys.readouterr().out

    Job.load("tune.yaml", registry=registry).build().train()
    outcome = InferenceJob.load("infer.yaml", registry=registry).build().run()
    assert outcome.rows == 10
    assert len(Path("runs/rows/output.tsv").read_text().splitlines()) == 10


@pytest.mark.full
def test_its_commands_checks_and_schedule_run(plugin: tuple[Path, str]) -> None:
    _, name = plugin
    assert d9d("plugins", "check", name, "--strict-plugins").endswith("19 records checked, 0 problems\n")
    assert "frozen_job: 60 steps" in d9d("check", "train.yaml", "--strict-plugins")
    assert "frozen_health: frozen and healthy" in d9d("doctor")
    assert d9d("frozen", "--name", "you") == "hello you, from API 2\n"
    d9d("train", "pipeline.yaml", "--nproc", "2")
    assert Path("runs/staged/lines.txt").read_text().startswith("1 loss=")
