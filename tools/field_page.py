"""Writes docs/fields.md: every field of every component that a job file can name, with its default and meaning.

    uv run python tools/field_page.py           write the page
    uv run python tools/field_page.py --check   exit with 1 if it is out of date

Fields, defaults and meanings come from the configs of the installed plugins; meanings are their docstrings.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from d9d_core.config import PluginConfig, Section
from d9d_core.job_file.lookup import load_config
from d9d_core.plugin import ConfiguredSpec
from d9d_core.registry.entries import Entry
from d9d_core.registry.hooks import KINDS
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "fields.md"
HEAD = """# Fields of components

Every component that a job file can name, with its fields; `d9d plugins show NAME` prints the same for the installed
version. The page [job file](job-file.md) has the fields of the job file itself. Written by `tools/field_page.py`.
"""


def components() -> Iterator[Entry]:
    """First-party components with a config, in the order of the job file's sections."""
    registry = discover(PluginPolicy())
    for kind in KINDS:
        for entry in registry.entries(kind.name) if kind.section else ():
            if isinstance(entry.spec, ConfiguredSpec) and (entry.origin.distribution or "").startswith("d9d-"):
                yield entry


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each field; nested fields have dotted names.

    If a field accepts one of several sections, the fields of each section follow, with the value that selects it.
    """
    for name, field in section.model_fields.items():
        if name == "name" and issubclass(section, PluginConfig):
            continue
        default = "required" if field.is_required() else f"`{_yaml(field.get_default(call_default_factory=True))}`"
        yield f"{prefix}{name}", default, " ".join((field.description or "").split())
        inside = [part for part in _parts(field.annotation) if not issubclass(part, PluginConfig)]
        for part in inside:
            chosen = f" ({_choice(part)})" if len(inside) > 1 else ""
            for inner, value, meaning in fields_of(part, f"{prefix}{name}."):
                yield f"{inner}{chosen}", value, meaning


def _choice(section: type[Section]) -> str:
    """Selecting field and value of a section, such as ``name: adamw``."""
    for name, field in section.model_fields.items():
        if typing.get_origin(field.annotation) is typing.Literal:
            return f"{name}: {typing.get_args(field.annotation)[0]}"
    return section.__name__


def _parts(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _parts(part)


def _yaml(value: Any) -> str:
    if isinstance(value, Section):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple | list | set | frozenset):
        value = [item.model_dump(mode="json") if isinstance(item, Section) else item for item in value]
    if isinstance(value, dict):
        value = {
            key: item.model_dump(mode="json") if isinstance(item, Section) else item for key, item in value.items()
        }
    if isinstance(value, Enum):
        value = value.value
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def _cell(text: str) -> str:
    """Text that cannot end a cell or begin an HTML tag."""
    return text.replace("``", "`").replace("|", "\\|").replace(" <", " &lt;")


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
        lines.append(f"`{entry.spec.key}` of {entry.origin.distribution}: {entry.spec.summary}\n")
        rows = [
            f"| `{name}` | {_cell(default)} | {_cell(meaning)} |"
            for name, default, meaning in fields_of(load_config(entry))
        ]
        lines += ["| field | default | meaning |", "|---|---|---|", *rows, ""] if rows else ["It has no fields.\n"]
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
