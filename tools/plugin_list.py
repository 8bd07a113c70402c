"""Checks the list of third-party plugins, docs/third-party.toml, and writes docs/plugins-list.md from it.

    uv run python tools/plugin_list.py           write docs/plugins-list.md
    uv run python tools/plugin_list.py --check   exit with 1 if it is out of date

The page also shows which packages implement each extension point, from the declarations of the workspace's members and
of the plugins under examples/.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from d9d_core.registry.entries import Entry
from d9d_core.registry.hooks import KINDS
from d9d_core.registry.policy import normalise
from d9d_core.registry.registry import Registry
from packaging.specifiers import InvalidSpecifier, SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs" / "third-party.toml"
PAGE = ROOT / "docs" / "plugins-list.md"
HEAD = """# Plugins

[Packages](packages.md) lists d9d's own plugins. The plugins below are **third-party**: their authors publish
them, and d9d's authors check neither their code nor their releases. An error about an unknown name tells the listed
package that has it.

To find unlisted plugins, search your package index for the keyword `d9d-plugin`. To propose yours, add it to
[third-party.toml](third-party.toml) with the outcome of [`d9d plugins conform`](writing-a-plugin.md#conformance).

<!-- written by tools/plugin_list.py -->
"""
_FIELDS = {"name": str, "distribution": str, "summary": str, "url": str, "core": str, "adds": dict}
_SUITES = {"date": date, "core": str, "passed": int}
_SUMMARY_LENGTH = 100


class ListError(Exception):
    """The list of plugins is wrong; the text has one line per problem."""


@dataclass(frozen=True)
class Plugin:
    """Entry of the list.

    Attributes:
        name: name of the plugin.
        distribution: normalised name of the distribution.
        summary: one line.
        url: https address of the repository, or a directory of this repository.
        core: range of d9d-core.
        adds: kind -> names.
        suites: date, core and number of passed tests of the last conformance run; ``None`` if there was none.
    """

    name: str
    distribution: str
    summary: str
    url: str
    core: str
    adds: Mapping[str, Sequence[str]]
    suites: Mapping[str, Any] | None = None

    @property
    def install(self) -> str:
        """Argument of ``pip install``."""
        return self.distribution if self.url.startswith("https://") else f"./{self.url}"


def listed(file: Path = LIST) -> list[Plugin]:
    """Plugins of the list.

    Raises:
        ListError: the file cannot be read, or an entry is wrong.
    """
    where = file.name
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ListError(f"{where}: {error}") from error
    problems = [f"{where}: unknown key '{key}'; write [[plugin]]" for key in document if key != "plugin"]
    tables = document.get("plugin", [])
    own = {file.parent.name for house in ("packages", "plugins") for file in ROOT.glob(f"{house}/*/pyproject.toml")}
    for number, table in enumerate(tables, 1):
        place = f"{where}, plugin {number} ({table.get('distribution', 'without a distribution')})"
        problems += [f"{place}: {text}" for text in _problems(table)]
        if normalise(str(table.get("distribution", ""))) in own:
            problems.append(f"{place}: this is a package of d9d; the list has third-party plugins only")
    problems += _doubles(where, tables)
    if problems:
        raise ListError("\n".join(problems))
    return [Plugin(**{**table, "distribution": normalise(table["distribution"])}) for table in tables]


def _problems(table: Mapping[str, Any]) -> Iterator[str]:
    for field, kind in _FIELDS.items():
        if field not in table:
            yield f"{field} is missing"
        elif not isinstance(table[field], kind) or not table[field]:
            yield f"{field} is {table[field]!r}; write a {kind.__name__} that is not empty"
    yield from (f"unknown field '{field}'" for field in table if field not in {*_FIELDS, "suites"})
    if len(str(table.get("summary", ""))) > _SUMMARY_LENGTH:
        yield f"the summary has more than {_SUMMARY_LENGTH} characters"
    yield from _url_problems(str(table.get("url", "https://")))
    try:
        SpecifierSet(str(table.get("core", "")))
    except InvalidSpecifier:
        yield f"core is {table['core']!r}, which is no range of versions; write one such as >=0.1,<0.2"
    yield from _kind_problems(table.get("adds", {}))
    suites = table.get("suites")
    if suites is not None and (
        not isinstance(suites, dict)
        or suites.keys() != _SUITES.keys()
        or not all(isinstance(suites[name], kind) for name, kind in _SUITES.items())
    ):
        yield "suites needs exactly date (such as 2026-11-28), core (a version) and passed (a number)"


def _url_problems(url: str) -> Iterator[str]:
    if "FILL-IN" in url or "://example." in url:
        yield f"url is the placeholder {url}; write the address of the repository"
    elif not url.startswith("https://") and not (ROOT / url / "pyproject.toml").is_file():
        yield f"url is {url!r}; write an address that begins with https://, or a directory of this repository"


def _kind_problems(adds: Any) -> Iterator[str]:
    kinds = [kind.name for kind in KINDS]
    for kind, names in adds.items() if isinstance(adds, dict) else ():
        if kind not in kinds:
            yield f"adds has the unknown kind '{kind}'; kinds: {', '.join(kinds)}"
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            yield f"adds.{kind} is {names!r}; write a list of names"


def _doubles(where: str, tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for field in ("name", "distribution"):
        count = Counter(normalise(str(table.get(field, ""))) for table in tables)
        for value in (value for value, number in count.items() if value and number > 1):
            numbers = [
                str(place) for place, table in enumerate(tables, 1) if normalise(str(table.get(field, ""))) == value
            ]
            yield f"{where}, plugins {' and '.join(numbers)}: both have the {field} '{value}'; rename or remove one"


def check_examples(plugins: Sequence[Plugin]) -> None:
    """Compare the entries about directories of this repository with the directories' declarations.

    Raises:
        ListError: an entry differs, or a plugin under examples/ is not listed.
    """
    problems = []
    local = {plugin.distribution: plugin for plugin in plugins if not plugin.url.startswith("https://")}
    for directory in examples():
        project = tomllib.loads((directory / "pyproject.toml").read_text("utf-8"))["project"]
        where = f"{LIST.name}: {project['name']}"
        plugin = local.get(project["name"])
        if plugin is None:
            problems.append(f"{where} is missing; add it, with the url {directory.relative_to(ROOT).as_posix()}")
            continue
        declared: dict[str, list[str]] = {}
        for entry in entries_of(directory):
            declared.setdefault(entry.kind.name, []).append(entry.spec.key)
        stated = {kind: sorted(names) for kind, names in plugin.adds.items()}
        if stated != {kind: sorted(names) for kind, names in declared.items()}:
            problems.append(f"{where}: adds is {stated}; its plugin.py declares {declared}")
        if f"d9d-core{plugin.core}" not in project["dependencies"]:
            problems.append(f"{where}: core is {plugin.core}; its pyproject.toml has another range")
    if problems:
        raise ListError("\n".join(problems))


def examples() -> list[Path]:
    """Directories of the plugins under examples/."""
    return sorted(file.parent for file in ROOT.glob("examples/*/pyproject.toml"))


def entries_of(directory: Path) -> list[Entry]:
    """Records that a package declares, from its sources."""
    project = tomllib.loads((directory / "pyproject.toml").read_text("utf-8"))["project"]
    source = str(directory / "src")
    if source not in sys.path:
        sys.path.insert(0, source)
    found = []
    for module in project.get("entry-points", {}).get("d9d", {}).values():
        registry = Registry.of(importlib.import_module(module))
        found += [entry for entry in registry.entries() if entry.origin.module == module]
    return found


def page(plugins: Sequence[Plugin]) -> str:
    """Content of the page."""
    rows = ["| plugin | adds | d9d-core | last passed suites |", "|---|---|---|---|"]
    for plugin in sorted(plugins, key=lambda plugin: plugin.distribution):
        link = plugin.url if plugin.url.startswith("https://") else f"../{plugin.url}/README.md"
        adds = "; ".join(f"{kind} {', '.join(map(_code, names))}" for kind, names in plugin.adds.items())
        suites = "none"
        if plugin.suites:
            suites = f"{plugin.suites['date']}, {plugin.suites['passed']} tests, d9d-core {plugin.suites['core']}"
        rows.append(f"| [{plugin.distribution}]({link}): {plugin.summary} | {adds} | `{plugin.core}` | {suites} |")
    return "\n".join([HEAD, *rows, "", *_extension_points(), ""])


def _extension_points() -> Iterator[str]:
    """Lines of the table of extension points, with the packages that implement each."""
    yield "## Extension points"
    yield ""
    yield "Each extension point has several implementations, one of them in an example that uses only public modules:"
    yield ""
    yield "| extension point | hook | implementations of d9d | in examples |"
    yield "|---|---|---|---|"
    members = [
        file.parent for house in ("packages", "plugins") for file in sorted(ROOT.glob(f"{house}/*/pyproject.toml"))
    ]
    own = [entry for directory in members for entry in entries_of(directory)]
    others = [(directory.name, entry) for directory in examples() for entry in entries_of(directory)]
    for kind in KINDS:
        count = sum(entry.kind == kind for entry in own)
        theirs = [f"`{entry.spec.key}` ({name})" for name, entry in others if entry.kind == kind]
        yield f"| {kind.name} | `{kind.hook}` | {count} | {', '.join(theirs) or 'none'} |"


def _code(name: str) -> str:
    return f"`{name}`"


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    try:
        plugins = listed()
        check_examples(plugins)
    except ListError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text("utf-8") == page(plugins):
            return 0
        print(f"{PAGE.name} is out of date; run: uv run python tools/plugin_list.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(plugins), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
