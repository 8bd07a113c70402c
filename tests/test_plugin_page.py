"""The page for plugin authors is complete, and its plugin works."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from d9d_core.plugin import ANCHORS, ConfiguredSpec
from d9d_core.registry.hooks import KINDS
from d9d_core.registry.registry import Registry
from d9d_core.traits import TRAITS
from d9d_engine.job import Job

from tests.documents import PAGES, ROOT, blocks_of, files_of, load, prose, quoted, tables

pytestmark = pytest.mark.usefixtures("_hello_and_nothing_that_stays")
PLUGIN_PAGE = ROOT / "docs/writing-a-plugin.md"


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
    rows = tables(PLUGIN_PAGE, "trait", "token", "the module provides")
    assert {quoted(r[1])[0]: quoted(r[0])[0] for r in rows} == {token: kind.__name__ for token, kind in TRAITS.items()}
    assert re.sub(r"\s+", " ", prose(PLUGIN_PAGE)).count(", ".join(f"`{anchor}`" for anchor in ANCHORS)) == 1
    suites = {
        name
        for file in (ROOT / "packages/d9d-testing/src/d9d_testing/suites").rglob("*.py")
        for name in re.findall(r"^class (\w+Suite)\b", file.read_text(), re.MULTILINE)
    } - {"ComponentSuite"}  # a base of others
    assert {quoted(row[0])[0] for row in tables(PLUGIN_PAGE, "suite", "for", "checks")} == suites


def test_it_names_every_reduction_of_metrics() -> None:
    from d9d_core.metric import Metric

    getter = inspect.getattr_static(Metric, "reductions").fget
    allowed = typing.get_args(typing.get_args(typing.get_type_hints(getter)["return"])[1])
    rows = tables(PLUGIN_PAGE, "reduction", "merged state", "starts from")
    assert [quoted(row[0])[0] for row in rows] == list(allowed)


def test_readmes_name_every_observation_of_a_task_and_who_reads_it(installed: Registry) -> None:
    header = ("task", "observation", "description", "metrics that read it")
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
    told = {name for name in never for row in rows if f"{name}`" in row and "only if the job names it" in row}
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
