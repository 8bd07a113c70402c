"""What the documentation says is so: examples work, tables are complete, names and links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import sys
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from d9d_core.extend import TRAITS, PluginConfig, Section
from d9d_core.plugin import ANCHORS, KINDS, ConfiguredSpec, PluginPolicy, Registry, discover
from d9d_core.testing import Document
from d9d_engine.api import InferenceJob, Job
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    + [page for top in ("packages", "plugins", "examples") for page in (ROOT / top).glob("*/README.md")]
)
CORE, WEIGHTS = ROOT / "packages/d9d-core/README.md", ROOT / "packages/d9d-weights/README.md"
PLUGIN_PAGE = ROOT / "docs/writing-a-plugin.md"
#: Modules of the foundation that other code may import; suites are declared as a whole package.
DECLARED = {
    "d9d_core.plugin",
    "d9d_core.extend",
    "d9d_core.testing",
    "d9d_weights",
    "d9d_engine.api",
    "d9d_engine.extend",
    "d9d_engine.testing",
}
TITLED = re.compile(r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, text: str) -> list[Block]:
    return [Block(page, m[1], m[2], text[: m.start()].count("\n") + 1) for m in FENCE.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]


def examples(language: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == language], ids=str)


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def tables(page: Path, *header: str) -> list[list[str]]:
    """The rows of all tables of a page that have this header; cells without the spaces around them."""
    lines = prose(page).splitlines()
    found: list[list[str]] = []
    for index, line in enumerate(lines):
        if cells(line) == list(header):
            for row in lines[index + 2 :]:
                if not row.startswith("|"):
                    break
                found.append(cells(row))
    assert found, f"{page.name} has no table with the columns {header}"
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(autouse=True)
def _hello_and_nothing_that_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example plugin is no member of the workspace, so it is not installed."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/d9d-hello/src"))
    monkeypatch.delenv("D9D_PLUGINS", raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("d9d_hello", "acme_zloss") or name.startswith("d9d_file_"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def installed() -> Registry:
    return discover(PluginPolicy())


# --- examples --------------------------------------------------------------------------------------------------------


def missing_imports(source: str) -> list[str]:
    """What a piece of Python imports from d9d's packages although it is not there."""
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


def exists(reference: str) -> bool:
    """Whether ``module``, ``module:attribute`` or ``module.attribute`` leads to something."""
    module, _, path = reference.partition(":")
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            value: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and what it imports is not
            continue
        return leads_on(value, [*parts[length:], *filter(None, path.split("."))])
    return False


def leads_on(value: Any, path: list[str]) -> bool:
    for part in path:
        if isinstance(value, type) and part in inspect.get_annotations(value):
            return True
        if not hasattr(value, part):
            if not inspect.ismodule(value):
                return False
            try:
                importlib.import_module(f"{value.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        value = getattr(value, part)
    return True


@examples("python")
def test_python_examples_compile_and_import_what_exists(block: Block) -> None:
    assert missing_imports(block.text) == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("from d9d_engine.api import Jobb", ["d9d_engine.api:Jobb"]),
        ("def f():\n    import d9d_core.apis", ["d9d_core.apis"]),
        ("import d9d_engine.api, d9d_core.plugin\nfrom d9d_engine import api\nfrom torch import nothing", []),
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
        ("from d9d_core.protocols.task import Task", {"d9d_core.protocols.task"}),
        ("def f():\n    import d9d_weights.graph", {"d9d_weights.graph"}),
        ("from d9d_core.extend import Task\nfrom d9d_engine import api\nimport d9d_nn.linear, torch", set()),
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


def completed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A job file; a fragment of one takes the other sections from the quickstart.

    In a section, ``...`` stands for the fields that the quickstart has there.
    """
    if {"model", "steps"} <= values.keys():
        return values
    base = Document.read(ROOT / "examples/quickstart/job.yaml").values
    sections = {
        key: base[key] | {k: v for k, v in value.items() if k != "..."}
        if isinstance(value, dict) and "..." in value
        else value
        for key, value in values.items()
    }
    return base | sections


def load(block: Block, directory: Path, registry: Registry) -> Job | InferenceJob:
    """Validate a YAML block, beside the files that its page tells the reader to write.

    What names a writer is an inference job; the model that it starts from is not here.
    """
    for name, text in files_of(block.page).items():
        (directory / Path(name).name).write_text(text)
    (directory / "block.yaml").write_text(block.text)
    values = Document.read(directory / "block.yaml").values
    infers = "writer" in values
    sizes = Document.read(ROOT / "examples/quickstart/job.yaml").values["model"]
    values = {**values, "model": sizes} if infers else completed(values)
    (directory / "job.json").write_text(json.dumps(values))
    kind = InferenceJob if infers else Job
    return kind.load(directory / "job.json", registry=None if "plugins" in values else registry)


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows whole: blocks with a title, or whose first line is a comment with a path."""
    found = {match[1]: match[2] for match in TITLED.finditer(page.read_text())}
    for block in blocks_of(page, page.read_text()):
        if named := re.match(r"# ([\w/.-]+\.(?:py|toml))\n", block.text):
            found[named[1]] = block.text
    return found


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


@pytest.mark.parametrize("text", ["optimizer: {name: adamw, rate: 1}", "modell: {}", "steps: 0", "task: nothing"])
def test_wrong_job_examples_are_recognised(text: str, installed: Registry, tmp_path: Path) -> None:
    from d9d_core.extend import JobError

    with pytest.raises(JobError):
        load(Block(ROOT / "README.md", "yaml", text, 1), tmp_path, installed)


# --- the reference of d9d-core ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """A field of the job file: its default as the reference writes it, and its choices if they are few."""

    default: str
    choices: tuple[str, ...]


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Field]]:
    for name, facts in section.model_fields.items():
        parts = [facts.annotation, *typing.get_args(facts.annotation)]
        inner = next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)
        nested = inner is not None and not issubclass(inner, PluginConfig)
        if not nested or facts.default is None:
            default = "required" if facts.default is PydanticUndefined else f"`{as_yaml(facts.default)}`"
            choices = [c for part in parts if typing.get_origin(part) is Literal for c in typing.get_args(part)]
            yield f"{prefix}{name}", Field(default, tuple(choices))
        if nested:
            assert inner is not None
            yield from fields_of(inner, f"{prefix}{name}.")


def as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(as_yaml(item) for item in value)}]"
    if isinstance(value, PluginConfig):
        return value.name
    if value == "":
        return '""'
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


def test_the_reference_names_every_field_of_the_job_file_with_its_default() -> None:
    rows = {quoted(field)[0]: default for field, default, _ in tables(CORE, "field", "default", "meaning")}
    assert rows == {name: field.default for name, field in fields_of(Job)}


def test_the_reference_names_every_choice() -> None:
    meanings = {quoted(name)[0]: (default, text) for name, default, text in tables(CORE, "field", "default", "meaning")}
    silent = [
        f"{name}: {choice}"
        for name, field in fields_of(Job)
        for choice in field.choices
        if f"`{choice}`" not in meanings[name] and f"`{choice}`" not in meanings[name][1]
    ]
    assert silent == []
    assert all(text for _, text in meanings.values())


def test_the_reference_names_every_event_in_order_with_its_fields() -> None:
    from d9d_core.extend import CATALOGUE

    rows = [(quoted(event)[0], quoted(fields)) for event, _, fields in tables(CORE, "event", "when", "fields")]
    assert rows == [(event.__name__, [field.name for field in dataclasses.fields(event)]) for event in CATALOGUE]


def test_the_reference_names_every_command_with_its_package_and_option() -> None:
    tool = import_tool("option_table")
    offered = {
        f"d9d {name}": "d9d-core" if command.callback.__module__.startswith("d9d_core.") else "d9d-engine"
        for name, command in tool.commands().items()
    }
    rows = tables(CORE, "command", "package", "what it does")
    documented = {re.split(r" \[| [A-Z]", quoted(command)[0])[0]: package for command, package, _ in rows}
    assert documented == offered
    text = CORE.read_text("utf-8")
    assert text == tool.written(text), "run: uv run python tools/option_table.py"


def test_a_wrong_table_of_options_is_recognised() -> None:
    tool = import_tool("option_table")
    text = CORE.read_text("utf-8")
    assert tool.written(text.replace("| `--nproc N` | `train` |", "| `--nproc N` | all |")) == text
    rows = {row[0]: row[1] for row in tables(CORE, "option", "of", "meaning")}
    assert rows["`--layout LAYOUT`"] == "`verify`"
    assert "`verify`" in rows["`--set FIELD=VALUE`"]


def import_tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_names_every_exit_status() -> None:
    import d9d_core.errors as errors

    known = {e.exit_code for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.D9dError)}
    assert {int(row[0]) for row in tables(CORE, "status", "meaning")} == known | {0, 130}


# --- the page for plugin authors -------------------------------------------------------------------------------------


def test_the_page_for_plugin_authors_names_every_record() -> None:
    header = ("hook", "job file", "record", "`build` gets", "and returns", "also")
    rows = {quoted(row[0])[0]: row for row in tables(PLUGIN_PAGE, *header)}
    named = {hook: (quoted(row[1]), quoted(row[2])) for hook, row in rows.items()}
    assert named == {kind.hook: ([kind.section] if kind.section else [], [kind.record.__name__]) for kind in KINDS}
    shared = {field.name for field in dataclasses.fields(ConfiguredSpec)}
    for kind in KINDS:
        own = {field.name for field in dataclasses.fields(kind.record)} - shared
        assert own <= set(quoted(rows[kind.hook][5])), f"{kind.hook}: name all of {sorted(own)}"


def test_the_page_for_plugin_authors_names_every_trait_anchor_and_suite() -> None:
    rows = tables(PLUGIN_PAGE, "trait", "token", "the module tells")
    assert {quoted(r[1])[0]: quoted(r[0])[0] for r in rows} == {token: kind.__name__ for token, kind in TRAITS.items()}
    assert re.sub(r"\s+", " ", prose(PLUGIN_PAGE)).count(", ".join(f"`{anchor}`" for anchor in ANCHORS)) == 1
    suites = {
        name
        for file in (ROOT / "packages/d9d-testing/src/d9d_testing/suites").rglob("*.py")
        for name in re.findall(r"^class (\w+Suite)\b", file.read_text(), re.MULTILINE)
    } - {"ComponentSuite"}  # a base of others
    assert {quoted(row[0])[0] for row in tables(PLUGIN_PAGE, "suite", "for", "checks")} == suites


def test_it_names_every_reduction_of_metrics() -> None:
    from d9d_core.extend import Metric

    getter = inspect.getattr_static(Metric, "reductions").fget
    allowed = typing.get_args(typing.get_args(typing.get_type_hints(getter)["return"])[1])
    rows = tables(PLUGIN_PAGE, "reduction", "merged state", "starts from")
    assert [quoted(row[0])[0] for row in rows] == list(allowed)


def test_readmes_name_every_observation_of_a_task_and_who_reads_it(installed: Registry) -> None:
    header = ("task", "observation", "what it is", "metrics that read it")
    documented = {
        (quoted(task)[0], quoted(name)[0]): set(quoted(metrics))
        for page in PAGES
        if "| observation |" in page.read_text()
        for task, name, _, metrics in tables(page, *header)
    }
    metrics = [entry.spec for entry in installed.entries("metric")]
    declared = {
        (task.spec.name, name): {metric.name for metric in metrics if name in metric.reads}
        for task in installed.entries("task")
        for name in task.spec.observes | task.spec.on_demand
    }
    assert documented == declared


def test_a_readme_says_of_every_backend_whether_it_is_taken_by_name_only(installed: Registry) -> None:
    rows = [line for page in PAGES for line in prose(page).splitlines() if line.startswith("|")]
    never = {e.spec.name for e in installed.entries("kernel") if "never chosen by itself" in e.spec.summary.lower()}
    assert never >= {"sdpa_flash", "grouped_gemm"}
    told = {name for name in never for row in rows if f"{name}`" in row and "only by name" in row}
    assert told == never


def test_the_messages_it_explains_are_those_of_the_foundation() -> None:
    foundation = ("d9d-core", "d9d-weights", "d9d-engine")
    source = "".join(f.read_text() for name in foundation for f in (ROOT / "packages" / name / "src").rglob("*.py"))
    pieces = [
        piece.strip()
        for row in tables(PLUGIN_PAGE, "message", "cause")
        for message in quoted(row[0])
        for piece in message.split("...")
    ]
    assert [piece for piece in pieces if piece not in source] == []


def test_its_single_file_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Registry) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in blocks_of(PLUGIN_PAGE, PLUGIN_PAGE.read_text()) if b.language == "yaml"]
    load(block, tmp_path, installed)
    small = ["steps=2", "device=cpu", "trackers=[]", "export=false"]
    trainer = Job.load(tmp_path / "job.json", overrides=small).build(lambda _note: None)
    result = trainer.step(0, trainer.prefetcher.next())
    assert result.terms.keys() == {"cross_entropy", "z"}
    assert result.loss.item() == pytest.approx(result.terms["cross_entropy"].item() + 1e-3 * result.terms["z"].item())
    assert trainer.train().status == "finished"


def test_its_package_passes_its_own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(PLUGIN_PAGE)
    package = tmp_path / "acme_zloss"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(files["src/acme_zloss/plugin.py"])
    imports, classes = parts_of(files["my_loss.py"])
    (package / "config.py").write_text(imports + classes["ZLossConfig"])
    (package / "task.py").write_text(imports + "from acme_zloss.config import ZLossConfig\n" + classes["ZLoss"])
    monkeypatch.syspath_prepend(str(tmp_path))

    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["entry-points"]["d9d"] == {"zloss": "acme_zloss.plugin"}
    names: dict[str, Any] = {}
    exec(files["tests/test_plugin.py"], names)  # as pytest would import it
    suite = names["TestPlugin"]()
    assert suite.plugin == "acme_zloss.plugin"
    tests = [method for name, method in inspect.getmembers(suite, inspect.ismethod) if name.startswith("test_")]
    assert len(tests) >= 9
    for test in tests:
        arguments = {"record_property": lambda *_: None} if inspect.signature(test).parameters else {}
        test(**arguments)


def parts_of(source: str) -> tuple[str, dict[str, str]]:
    """The imports of a file, and its classes."""
    tree = ast.parse(source)
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    classes = {node.name: ast.unparse(node) + "\n" for node in tree.body if isinstance(node, ast.ClassDef)}
    return "\n".join(imports) + "\n", classes


# --- names and links -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_the_text_exist(page: Path) -> None:
    references = re.findall(r"`(d9d_\w+(?:\.\w+)+(?::\w+(?:\.\w+)*)?)`", prose(page))
    assert [reference for reference in references if not exists(reference)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, prose(page)) == []


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    return broken


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_broken_links_and_names_are_recognised() -> None:
    text = "[a](nowhere.md) [b](README.md#start-here) [c](README.md) [d](https://example.org/x) [e](#no)"
    assert broken_links(ROOT / "README.md", text) == ["nowhere.md", "README.md#start-here", "#no"]
    assert not exists("d9d_engine.step.step:TrainStep.walk")
    assert not exists("d9d_engine.run.steps")
    assert exists("d9d_engine.step.step:TrainStep.__call__")
    assert exists("d9d_core.errors.D9dError")


def test_the_quickstart_is_what_fragments_are_completed_from() -> None:
    base = yaml.safe_load((ROOT / "examples/quickstart/job.yaml").read_text())
    assert completed({"steps": 5})["model"] == base["model"]
    assert completed({"model": {"hidden_size": 1, "...": None}})["model"] == base["model"] | {"hidden_size": 1}
