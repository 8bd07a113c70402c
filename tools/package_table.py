"""Writes the table of packages, docs/packages.md: description of each, and the names that it offers.

    uv run python tools/package_table.py           write the page
    uv run python tools/package_table.py --check   exit with 1 if it is out of date

Descriptions come from the members' ``pyproject.toml``, names from the table that ``tools/known_plugins.py`` writes.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "packages.md"
KNOWN = ROOT / "packages" / "d9d-core" / "src" / "d9d_core" / "registry" / "known_plugins.json"
BEGIN, END = "<!-- packages: begin, by tools/package_table.py -->", "<!-- packages: end -->"
#: Kinds whose names users write into a job file or on the command line -> singular and plural for the table.
WORDS = {
    "command": ("command", "commands"),
    "model": ("model", "models"),
    "task": ("task", "tasks"),
    "inference task": ("inference task", "inference tasks"),
    "dataset": ("dataset", "datasets"),
    "metric": ("metric", "metrics"),
    "optimizer": ("optimizer", "optimizers"),
    "lr schedule": ("learning-rate schedule", "learning-rate schedules"),
    "strategy": ("strategy", "strategies"),
    "schedule": ("schedule", "schedules"),
    "peft method": ("method", "methods"),
    "kernel": ("kernel", "kernels"),
    "tracker": ("tracker", "trackers"),
    "writer": ("writer", "writers"),
    "subscriber": ("subscriber", "subscribers"),
    "head": ("head", "heads"),
    "launcher": ("launcher", "launchers"),
}
#: Packages that come first in the table: foundation, then d9d-nn; the others follow by name.
FIRST = ("d9d-core", "d9d-weights", "d9d-engine", "d9d-nn")


def rows() -> list[str]:
    """One row for each member of the workspace."""
    homes: dict[str, dict[str, str]] = json.loads(KNOWN.read_text("utf-8"))["homes"]
    files = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")], key=_place)
    found = []
    for file in files:
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        name, readme = project["name"], f"../{(file.parent / 'README.md').relative_to(ROOT).as_posix()}"
        parts = [project["description"].removesuffix(".")]
        for kind, words in WORDS.items():
            names = _names(homes.get(kind, {}), kind, name)
            parts += [f"{words[len(names) > 1]} {', '.join(names)}"] if names else []
        found.append(f"| [{name}]({readme}) | {'; '.join(parts)} |")
    return found


def _place(file: Path) -> tuple[bool, int, str]:
    name = file.parent.name
    return file.parts[-3] == "plugins", FIRST.index(name) if name in FIRST else len(FIRST), name


def _names(homes: dict[str, str], kind: str, distribution: str) -> list[str]:
    """Names that a distribution offers; for kernels, only the backends without the ops."""
    names = [name for name, home in homes.items() if home == distribution]
    if kind == "kernel":
        names = list(dict.fromkeys(name.partition(".")[2] for name in names))
    return [f"`d9d {name}`" if kind == "command" else f"`{name}`" for name in names]


def written(text: str) -> str:
    """The page with an up-to-date table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(["| package | what it offers |", "|---|---|", *rows()])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    """Write the table, or check it."""
    if set(sys.argv[1:]) - {"--check"}:
        raise SystemExit(__doc__)
    text = PAGE.read_text("utf-8")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(written(text), encoding="utf-8", newline="\n")
    elif written(text) != text:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} is out of date; run: uv run python tools/package_table.py")


if __name__ == "__main__":
    main()
