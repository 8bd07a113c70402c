"""Table of a mutation campaign and the list of its survivors."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox import ROOT
from slips import GROUPS

PAGE = ROOT / "docs" / "mutations.md"
REASONS = Path(__file__).parent / "survivors.toml"
MARKS = "<!-- campaign: begin -->", "<!-- campaign: end -->"
#: First words of the reason of a survivor that no test can notice, since nothing that callers observe changes.
EQUAL = "equal results"
Row = dict[str, Any]


def report(out: Path, write: bool) -> None:
    """Print the report of a campaign, or write it into the documentation."""
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    controls = [row for row in rows if row["kind"] == "control"]
    rows = sorted((row for row in rows if row["kind"] != "control"), key=lambda row: (row["file"], row["line"]))
    reasons = {entry["key"]: entry["reason"] for entry in tomllib.loads(REASONS.read_text("utf-8")).get("survivor", [])}
    survivors = [row for row in rows if row["verdict"] != "killed"]
    print(table(rows, reasons))
    for row in survivors:
        print(f"\n{row['file']}:{row['line']}: {row['kind']}, {row['verdict']} {row['tests']} tests")
        print(f"    {row['source']}\n    {row['change']}\n    {reasons.get(row['key'], 'no reason given')}")
    for row in survivors:
        if row["key"] not in reasons:
            print(f'\n[[survivor]]\nkey = {json.dumps(row["key"])}\nreason = ""')
    failed = [row for row in controls if row["verdict"] == "killed"]
    print(f"\n{len(controls)} controls without a slip, {len(failed)} of them failed:", *(row["by"] for row in failed))
    if write:
        begin, end = MARKS
        text = PAGE.read_text("utf-8")
        before, after = text.split(begin)[0], text.split(end)[1]
        PAGE.write_text(
            f"{before}{begin}\n{table(rows, reasons)}\n\n{listed(survivors, reasons)}\n{end}{after}", "utf-8"
        )


def table(rows: Sequence[Row], reasons: Mapping[str, str]) -> str:
    """Counts of each group as Markdown; the last column is the share of the slips that change a result."""
    lines = [
        "| members | slips | killed | by its own tests | killed, % | equal results | killed of the others, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for group, members in GROUPS.items():
        lines.append(_counts(group, [row for row in rows if row["member"] in members], reasons))
    lines.append(_counts("all", rows, reasons))
    return "\n".join(lines)


def listed(survivors: Iterable[Row], reasons: Mapping[str, str]) -> str:
    """Survivors as Markdown."""
    lines = ["| survivor | slip | why |", "|---|---|---|"]
    for row in survivors:
        source, change = (row[name].replace("|", "\\|").replace("`", "'") for name in ("source", "change"))
        place = row["file"].split("/src/")[1]
        lines.append(f"| {place}: `{source}` | {row['kind']}: `{change}` | {reasons.get(row['key'], '')} |")
    return "\n".join(lines)


def _counts(name: str, rows: Sequence[Row], reasons: Mapping[str, str]) -> str:
    killed = [row for row in rows if row["verdict"] == "killed"]
    near = sum(not row["far"] for row in killed)
    equal = sum(row["verdict"] != "killed" and reasons.get(row["key"], "").startswith(EQUAL) for row in rows)
    of_all, of_others = (f"{100 * len(killed) / max(1, count):.1f}" for count in (len(rows), len(rows) - equal))
    return f"| {name} | {len(rows)} | {len(killed)} | {near} | {of_all} | {equal} | {of_others} |"
