"""Writes docs/fields.md: every field of every component that a job file can name, with its values and its meaning.

    uv run python tools/field_page.py           write the page
    uv run python tools/field_page.py --check   exit with 1 if it is out of date

Fields, defaults and meanings come from the configs of the installed plugins; meanings are their docstrings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from d9d_core.job_file.fields import ConfigField, fields_of
from d9d_core.job_file.lookup import load_config
from d9d_core.plugin import ConfiguredSpec
from d9d_core.registry.entries import Entry
from d9d_core.registry.hooks import KINDS
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from word_page import spellings

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "fields.md"
HEAD = """# Fields of components

Every component that a job file can name, with its fields; `d9d plugins show NAME` prints the same fields for the
installed version. In the name of a field, `NAME` stands for any key of a map, and `[]` for an entry of a list: a job
file writes `groups[].match` as `groups: [{match: ...}]`. The manual of each component is the page of its package,
linked below. A test sets each field to a value other than its default (`tests/test_field_page.py`). The page [job
file](job-file.md) has the fields of the job file itself. Written by `tools/field_page.py`.
"""


def components() -> Iterator[Entry]:
    """First-party components with a config, in the order of the job file's sections."""
    registry = discover(PluginPolicy())
    for kind in KINDS:
        for entry in registry.entries(kind.name) if kind.section else ():
            if isinstance(entry.spec, ConfiguredSpec) and (entry.origin.distribution or "").startswith("d9d-"):
                yield entry


def manual(entry: Entry) -> str:
    """Link to the manual of a component: the README of its package."""
    name = entry.origin.distribution
    folder = next(folder for folder in ("packages", "plugins") if (ROOT / folder / str(name)).is_dir())
    return f"[{name}](../{folder}/{name}/README.md)"


def _cell(text: str) -> str:
    """Text that cannot end a cell or begin an HTML tag."""
    return text.replace("``", "`").replace("|", "\\|").replace(" <", " &lt;")


def _default(field: ConfigField) -> str:
    return "required" if field.default is None else _cell(f"`{field.default}`")


def _meaning(entry: Entry, field: ConfigField) -> str:
    words = spellings(f"{entry.kind.section}.{field.name}")
    return f"{_cell(field.meaning)} In other tools: {words}." if words else _cell(field.meaning)


def _elsewhere(entry: Entry) -> str:
    """Sentence with the words of other tools for a component."""
    name, section = entry.spec.key, entry.kind.section
    pieces = (name, f"{section}: [{name}]", f"{section}: {{name: {name}}}")
    words = ", ".join(filter(None, map(spellings, pieces)))
    return f"In other tools: {words}." if words else ""


def page() -> str:
    """Text of the page."""
    found = list(components())
    kinds = dict.fromkeys(entry.kind.name for entry in found)
    lines = [HEAD, f"Kinds: {', '.join(f'[{kind}](#{kind.replace(chr(32), chr(45))})' for kind in kinds)}.\n"]
    kind = None
    for entry in found:
        if entry.kind.name != kind:
            kind = entry.kind.name
            lines.append(f"## {entry.kind.name}\n")
        lines.append(f"### {entry.spec.key}\n")
        elsewhere = f" {words}" if (words := _elsewhere(entry)) else ""
        lines.append(f"`{entry.spec.key}` of {manual(entry)}: {entry.spec.summary}{elsewhere}\n")
        rows = [
            f"| `{field.name}` | {_cell(field.kind)} | {_default(field)} | {_meaning(entry, field)} |"
            for field in fields_of(load_config(entry))
        ]
        head = ["| field | accepts | default | meaning |", "|---|---|---|---|"]
        lines += [*head, *rows, ""] if rows else ["It has no fields.\n"]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write or check the page."""
    if set(sys.argv[1:]) - {"--check"}:
        raise SystemExit(__doc__)
    text = page()
    if "--check" in sys.argv[1:]:
        if text != PAGE.read_text("utf-8"):
            raise SystemExit("docs/fields.md is out of date; run: uv run python tools/field_page.py")
        return
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
