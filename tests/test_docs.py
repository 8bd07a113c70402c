"""Documentation: the reference of d9d-core is complete, and names and links lead somewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from d9d_core.config import PluginConfig, Section
from d9d_core.registry.known import KnownPlugins
from d9d_core.registry.policy import FOUNDATION
from d9d_engine.job import Job
from d9d_engine.run.interrupt import STOPPED
from pydantic_core import PydanticUndefined

from tests.documents import PAGES, ROOT, exists, prose, quoted, tables

pytestmark = pytest.mark.usefixtures("_hello_and_nothing_that_stays")
JOURNEYS = sorted((ROOT / "docs" / "journeys").glob("*.md"))
JOB_FILE, COMMANDS, EVENTS = (ROOT / "docs" / f"{name}.md" for name in ("job-file", "command-line", "events"))


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
    rows = {quoted(field)[0]: default for field, default, _ in tables(JOB_FILE, "field", "default", "meaning")}
    assert rows == {name: field.default for name, field in fields_of(Job)}


def test_the_reference_names_every_choice() -> None:
    meanings = {
        quoted(name)[0]: (default, text) for name, default, text in tables(JOB_FILE, "field", "default", "meaning")
    }
    silent = [
        f"{name}: {choice}"
        for name, field in fields_of(Job)
        for choice in field.choices
        if f"`{choice}`" not in meanings[name] and f"`{choice}`" not in meanings[name][1]
    ]
    assert silent == []
    assert all(text for _, text in meanings.values())


def test_the_reference_names_every_event_in_order_with_its_fields() -> None:
    from d9d_core.events import CATALOGUE

    rows = [(quoted(event)[0], quoted(fields)) for event, _, fields in tables(EVENTS, "event", "when", "fields")]
    assert rows == [(event.__name__, [field.name for field in dataclasses.fields(event)]) for event in CATALOGUE]


def test_the_reference_names_every_command_with_its_package_and_option() -> None:
    tool = import_tool("option_table")
    homes = {
        f"d9d {name}": command.callback.__module__.partition(".")[0].replace("_", "-")
        for name, command in tool.commands().items()
    }
    offered = {name: home for name, home in homes.items() if home in FOUNDATION}
    rows = tables(COMMANDS, "command", "package", "action")
    documented = {re.split(r" \[| [A-Z]", quoted(command)[0])[0]: package for command, package, _ in rows}
    assert documented == offered
    text = COMMANDS.read_text("utf-8")
    assert text == tool.written(text), "run: uv run python tools/option_table.py"


def test_the_reference_names_every_command_of_the_plugins() -> None:
    offered = {name: home for name, home in KnownPlugins.shipped().names("command").items() if home not in FOUNDATION}
    rows = tables(COMMANDS, "command of a plugin", "package", "action")
    documented = {quoted(command)[0].removeprefix("d9d "): package for command, package, _ in rows}
    named = {next(name for name in offered if command.startswith(f"{name} ")) for command in documented}
    assert named == offered.keys()
    assert all(
        package == offered[name]
        for command, package in documented.items()
        for name in named
        if command.startswith(f"{name} ")
    )


def test_a_wrong_table_of_options_is_recognised() -> None:
    tool = import_tool("option_table")
    text = COMMANDS.read_text("utf-8")
    assert tool.written(text.replace("| `--lines N` | `launch status` | `10`", "| `--lines N` | all | `10`")) == text
    rows = {row[0]: row[1:3] for row in reversed(tables(COMMANDS, "option", "of", "default", "meaning"))}
    assert rows["`--layout LAYOUT`"] == ["`verify`", ""]
    assert rows["`--max-ranks N`"] == ["`verify`", "`8`, at least 1"]
    assert "`verify`" in rows["`--set FIELD=VALUE`"][0]
    assert rows["`--plugin FILE`"][0].startswith("all but ")
    assert "`state diff`" in rows["`--plugin FILE`"][0]


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
    assert {int(row[0]) for row in tables(COMMANDS, "status", "meaning")} == known | {0, STOPPED, 130}


# --- names and links -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
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


# --- commands of the pages -------------------------------------------------------------------------------------------


def test_the_start_pages_say_how_a_clone_runs_the_commands_of_all_pages() -> None:
    for page in ("README.md", "docs/index.md"):
        text = " ".join((ROOT / page).read_text("utf-8").split())
        assert "`source .venv/bin/activate`" in text, page
        assert re.search(r"put `uv run` in front.* `uv sync`", text) or re.search(r"`uv sync`.* put `uv run`", text), (
            page
        )
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_the_environment_of_a_clone_has_what_the_pages_install() -> None:
    """Packages and extras of d9d in ``pip install`` of the journeys; tools of other projects are listed by name."""
    wanted = set(re.findall(r"pip install ([^`]+)`", "".join(page.read_text("utf-8") for page in JOURNEYS)))
    names = {word.strip("\"'").partition("[")[0] for one in wanted for word in one.split() if not word.startswith("-")}
    missing = {name for name in names - {"acme"} if importlib.util.find_spec(name.replace("-", "_")) is None}
    assert not missing


def test_the_levels_of_tests_are_explained_with_their_files() -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["markers"]
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    levels, files = text.split("| marker | tests |")[1].split("| marker | files |")
    for marker in (marker.partition(":")[0] for marker in markers):
        assert f"`{marker}`" in levels, marker
        assert f"| `{marker}` |" in files, marker
