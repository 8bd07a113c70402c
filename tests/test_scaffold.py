"""``d9d new plugin``: every kind installs, passes its suite and trains, as its README says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from d9d_core.errors import PluginError
from d9d_testing.scaffold.kinds import KINDS
from d9d_testing.scaffold.package import plugin_files, write_plugin

ROOT = Path(__file__).parents[1]


def name_of(kind: str) -> str:
    return f"acme-{kind.replace('_', '-')}"


@pytest.fixture(scope="module")
def scaffolds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a package of each kind."""
    directory = tmp_path_factory.mktemp("scaffolds")
    for kind in KINDS:
        write_plugin(directory / name_of(kind), name_of(kind), kind)
    return directory


class Site:
    """Scaffolds that were installed from wheels, in addition to the packages of this Python."""

    def __init__(self, scaffolds: Path) -> None:
        self.scaffolds = scaffolds
        self.kinds: set[str] = set()
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "UV_PYTHON")}
        self.environ = {**environ, "PYTHONPATH": str(scaffolds / "site")}

    def install(self, kinds: Sequence[str]) -> None:
        new = [kind for kind in kinds if kind not in self.kinds]
        wheels = [next(self._build(kind).glob("*.whl")) for kind in new]
        if new:
            where = ("--no-deps", "--python", sys.executable, "--target", str(self.scaffolds / "site"))
            self._uv("pip", "install", "--quiet", *where, *map(str, wheels))
        self.kinds.update(new)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run this Python among the scaffolds."""
        return subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=False,
            env=self.environ,
            cwd=self.scaffolds,
        )

    def _build(self, kind: str) -> Path:
        target = self.scaffolds / "wheels" / kind
        self._uv("build", "--quiet", "--wheel", "--out-dir", str(target), str(self.scaffolds / name_of(kind)))
        return target

    def _uv(self, *command: str) -> None:
        environ = {name: value for name, value in self.environ.items() if name != "PYTHONPATH"}
        subprocess.run(["uv", *command], check=True, capture_output=True, text=True, env=environ)


@pytest.fixture(scope="module")
def site(scaffolds: Path) -> Site:
    return Site(scaffolds)


def test_there_is_a_template_of_every_extension_point() -> None:
    from d9d_core.registry.hooks import KINDS as HOOKS

    assert {kind.hook for kind in KINDS.values()} == {hook.hook for hook in HOOKS}


def test_the_workflow_of_a_scaffold_fits_the_schema_of_the_forge(tmp_path: Path) -> None:
    write_plugin(tmp_path / "acme", "acme", "metric")
    workflow = tmp_path / "acme" / ".github" / "workflows" / "ci.yml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, str(workflow)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    workflow.write_text(workflow.read_text().replace("runs-on:", "runs-at:"))
    done = subprocess.run([*command, str(workflow)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, "the schema would accept any file"
    assert "runs-on" in done.stdout


def test_the_documentation_quotes_the_templates() -> None:
    command = [sys.executable, "tools/template_page.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaffold_is_complete_and_small(kind: str) -> None:
    files = plugin_files("Acme-Thing", kind)
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "job.yaml",
        ".github/workflows/ci.yml",
        "src/acme_thing/conformance.py",
        "src/acme_thing/plugin.py",
        "src/acme_thing/py.typed",
    } <= files.keys()
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["entry-points"]["d9d"] == {"acme_thing": "acme_thing.plugin"}
    assert project["entry-points"]["d9d.conformance"] == {"acme_thing": "acme_thing.conformance"}
    assert "d9d-plugin" in project["keywords"]
    assert project["license"] == "MIT"
    assert "FILL-IN" in project["urls"]["Repository"]
    for path, text in files.items():
        assert "$" not in text.replace("${{ matrix.", "").replace("echo $? >", ""), path
        if path.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines()), default=0) <= 120, path
    refers = KINDS[kind].configured or (KINDS[kind].module and KINDS[kind].entry != "")
    assert ("Ref(" in files["src/acme_thing/plugin.py"]) == refers


@pytest.mark.parametrize(
    ("name", "kind", "complaint"),
    [
        ("acme", "metrics", "--kind metrics: there is no template of this kind; kinds: metric, tracker"),
        ("9lives", "metric", "'9lives' is not a package name"),
        ("d9d-mine", "metric", "names that begin with d9d- are reserved for first-party packages"),
    ],
)
def test_what_cannot_be_scaffolded_is_refused(tmp_path: Path, name: str, kind: str, complaint: str) -> None:
    with pytest.raises(PluginError, match=re.escape(complaint)):
        write_plugin(tmp_path / "new", name, kind)
    assert not (tmp_path / "new").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(PluginError, match="is not empty"):
        write_plugin(tmp_path, "acme", "metric")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_scaffolds_are_formatted_and_linted(scaffolds: Path) -> None:
    sources = [str(scaffolds / name_of(kind)) for kind in KINDS]
    config = ["--config", str(ROOT / "pyproject.toml")]
    # As the configuration has it for our own tests.
    tests = ["--extend-per-file-ignores", ",".join(f"test_*.py:{rule}" for rule in ("ARG", "D", "PLR", "S"))]
    for command in (["ruff", "format", "--check", *config], ["ruff", "check", *config, *tests]):
        done = subprocess.run([*command, *sources], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.full
def test_scaffolds_are_typed(site: Site) -> None:
    site.install(list(KINDS))
    packages = [word for kind in KINDS for word in ("-p", name_of(kind).replace("-", "_"))]
    done = site.run("-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *packages)
    assert done.returncode == 0, done.stdout


@pytest.mark.full
def test_every_kind_passes_its_suite(site: Site) -> None:
    site.install(list(KINDS))
    roots = [site.scaffolds / name_of(kind) for kind in KINDS]
    tests = [str(root / "tests") for root in roots]
    suites = [str(next(root.glob("src/*/conformance.py"))) for root in roots]
    done = site.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *tests, *suites)
    assert done.returncode == 0, done.stdout


TRAIN = """
import os, sys
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob
for kind in sys.argv[1:]:
    directory = f"acme-{kind.replace('_', '-')}"
    os.chdir(directory)
    outcome = Job.load("job.yaml", overrides=["steps=4", "logging.every=2"]).build(note=lambda text: None).train()
    print(kind, outcome.status, outcome.step)
    if os.path.exists("infer.yaml"):
        InferenceJob.load("infer.yaml").build().run()
    os.chdir("..")
"""


@pytest.mark.full
def test_every_kind_trains_with_its_job(site: Site) -> None:
    site.install(list(KINDS))
    done = site.run("-c", TRAIN, *KINDS)
    assert done.returncode == 0, done.stderr
    for kind in KINDS:
        assert f"{kind} finished 4" in done.stdout
    written = {"tracker": "acme_tracker.csv", "subscriber": "acme_subscriber.jsonl"}
    for kind, file in written.items():
        assert (site.scaffolds / f"acme-{kind}/runs/acme_{kind}" / file).exists()
    rows = (site.scaffolds / "acme-writer/runs/acme_writer_rows/output.csv").read_text().splitlines()
    assert len(rows) == 9, "the writer gets 8 samples and writes a line of names"
    assert (
        '"improbable"'
        in (site.scaffolds / "acme-inference-task/runs/acme_inference_task_rows/output.jsonl").read_text()
    )
