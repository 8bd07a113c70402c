"""Examples in the documentation work: Python imports what exists, and jobs are valid."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from d9d_core.registry.api import Api
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job

from tests.documents import PAGES, ROOT, Block, blocks_of, completed, exists, load

pytestmark = pytest.mark.usefixtures("_hello_and_nothing_that_stays")
WEIGHTS = ROOT / "packages/d9d-weights/README.md"
#: Modules of the foundation that other code may import; suites are declared as a whole package.
DECLARED = set(Api.shipped().names)
BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]


def examples(language: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == language], ids=str)


def missing_imports(source: str) -> list[str]:
    """Names that a piece of Python imports from d9d's packages and that do not exist."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}:{alias.name}" for alias in node.names]
        else:
            continue
        missing += [name for name in names if name.startswith("d9d_") and not exists(name)]
    return missing


@pytest.mark.thorough
@examples("python")
def test_python_examples_compile_and_import_what_exists(block: Block) -> None:
    assert missing_imports(block.text) == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("from d9d_engine.job import Jobb", ["d9d_engine.job:Jobb"]),
        ("def f():\n    import d9d_core.apis", ["d9d_core.apis"]),
        ("import d9d_engine.job, d9d_core.plugin\nfrom d9d_engine import job\nfrom torch import nothing", []),
    ],
)
def test_missing_imports_are_recognised(source: str, missing: list[str]) -> None:
    assert missing_imports(source) == missing


def undeclared_imports(source: str) -> set[str]:
    """Modules of the foundation that a piece of Python imports although they may change."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} if node.module in DECLARED or not modules & DECLARED else modules
    foundation = {name for name in found if name.partition(".")[0] in ("d9d_core", "d9d_weights", "d9d_engine")}
    return foundation - DECLARED


@examples("python")
def test_python_examples_import_declared_modules_only(block: Block) -> None:
    assert undeclared_imports(block.text) == set()


@pytest.mark.parametrize(
    ("source", "undeclared"),
    [
        ("from d9d_core.job_file.reading import Task", {"d9d_core.job_file.reading"}),
        ("def f():\n    import d9d_weights.graph", {"d9d_weights.graph"}),
        ("from d9d_core.task import Task\nfrom d9d_engine import job\nimport d9d_nn.linear, torch", set()),
    ],
)
def test_undeclared_imports_are_recognised(source: str, undeclared: set[str]) -> None:
    assert undeclared_imports(source) == undeclared


def test_the_example_of_the_weights_package_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in blocks_of(WEIGHTS, WEIGHTS.read_text()) if b.language == "python"]
    exec(block.text, {"__name__": "example"})  # ends with an assertion
    assert "assert " in block.text
    assert {file.name for file in (tmp_path / "published").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.thorough
@examples("yaml")
def test_job_examples_are_valid(
    block: Block, installed: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load(block, tmp_path, installed)


@pytest.mark.parametrize("file", sorted((ROOT / "examples/quickstart").glob("*.yaml")), ids=lambda file: file.name)
def test_the_quickstarts_can_run_and_the_readme_names_them(file: Path, installed: Registry) -> None:
    Job.load(file, registry=installed).plan()
    assert f"examples/quickstart/{file.name}" in (ROOT / "README.md").read_text()


@pytest.mark.thorough
def test_the_plugin_of_the_readme_reports_a_high_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "README.md"
    (block,) = [block for block in blocks_of(page, page.read_text()) if block.language == "python"]
    (tmp_path / "loss_alarm.py").write_text(block.text)
    settings = [f"plugins.files=[{tmp_path}/loss_alarm.py]", "subscribers=[{name: loss_alarm, above: 1}]", "steps=1"]
    settings += [
        "data={name: text, sources: [python:topics], sequence_length: 128}",
        "evaluation=null",
        "lr_schedule=null",
    ]
    Job.load(ROOT / "examples/quickstart/job.yaml", overrides=settings).build().train()
    assert "step 1: the loss is above 1.0" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["optimizer: {name: adamw, rate: 1}", "modell: {}", "steps: 0", "task: nothing"])
def test_wrong_job_examples_are_recognised(text: str, installed: Registry, tmp_path: Path) -> None:
    from d9d_core.errors import JobError

    with pytest.raises(JobError):
        load(Block(ROOT / "README.md", "yaml", text, 1), tmp_path, installed)


def test_the_quickstart_is_what_fragments_are_completed_from() -> None:
    base = yaml.safe_load((ROOT / "examples/quickstart/job.yaml").read_text())
    assert completed({"steps": 5})["model"] == base["model"]
    assert completed({"model": {"hidden_size": 1, "...": None}})["model"] == base["model"] | {"hidden_size": 1}


def docstring_examples() -> list[Block]:
    """Literal blocks with Python in the docstrings of the declared modules of core."""
    found = []
    for module in sorted(name for name in DECLARED if name.startswith("d9d_core.")):
        page = ROOT / "packages/d9d-core/src" / f"{module.replace('.', '/')}.py"
        text = ast.get_docstring(ast.parse(page.read_text("utf-8"))) or ""
        literals = re.findall(r"::\n\n((?:    .*\n|\n)+)", f"{text}\n")
        found += [Block(page, "python", textwrap.dedent(literal), 1) for literal in literals]
    return found


def test_the_main_topics_begin_with_an_example() -> None:
    topics = {block.page.stem for block in docstring_examples()}
    assert topics >= {"config", "data", "inference", "kernel", "metric", "model", "optimizer", "peft", "plugin"}
    assert topics >= {"schedule", "strategy", "subscriber", "task", "tracker", "traits"}


@pytest.mark.parametrize("block", docstring_examples(), ids=str)
def test_examples_of_docstrings_run(block: Block) -> None:
    assert block.text.count("\n") <= 24
    exec(block.text, {"__name__": "example"})
