"""Pages of the documentation: their blocks, tables and names, and the jobs that they show."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d9d_core.job_file.document import Document
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    + [page for top in ("packages", "plugins", "examples") for page in (ROOT / top).glob("*/README.md")]
)
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
                raise  # it exists, and an import of it does not
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
    """Validate a YAML block, next to the files that its page tells the reader to write.

    A job with a writer is an inference job. A model directory that the page names does not exist here; the job gets the
    sizes of the quickstart in its place.
    """
    for name, text in files_of(block.page).items():
        (directory / Path(name).name).write_text(text)
    (directory / "block.yaml").write_text(block.text)
    values = Document.read(directory / "block.yaml").values
    infers = "writer" in values
    sizes = Document.read(ROOT / "examples/quickstart/job.yaml").values["model"]
    absent = "model" in values and str(values["model"].get("pretrained", "")).startswith("./")
    filled = {**values, "model": sizes} if infers or absent else values
    values = dict(filled if infers else completed(filled))
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
