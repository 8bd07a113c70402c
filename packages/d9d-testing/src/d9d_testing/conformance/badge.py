"""Badge of a conformance run: an image and a JSON file, for a README or a list of plugins."""

from __future__ import annotations

import json
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from d9d_testing.conformance.run import Outcome

_COLOURS = {"passed": "#2e7d32", "incomplete": "#9e6a03", "failed": "#c62828"}
#: Width of a character and of the margin, in pixels; the text is stretched to the computed width.
_CHARACTER, _MARGIN = 6.6, 8


def facts(outcome: Outcome, today: date) -> dict[str, Any]:
    """Contents of the JSON file: versions, date, status, numbers of tests, errors, and one object per row."""
    return {
        "distribution": outcome.name,
        "version": outcome.version,
        "d9d_core": version("d9d-core"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "date": today.isoformat(),
        "status": _status(outcome),
        "passed": outcome.count("passed"),
        "failed": outcome.count("failed"),
        "skipped": outcome.count("skipped"),
        "errors": list(outcome.errors),
        "components": [
            {
                "kind": row.kind,
                "name": row.name,
                "verdict": row.verdict,
                "suites": list(row.suites),
                "passed": row.passed,
                "failed": row.failed,
                "skipped": row.skipped,
            }
            for row in outcome.rows
        ],
    }


def image(outcome: Outcome) -> str:
    """SVG with the version of d9d-core and the outcome."""
    left, status = f"d9d {version('d9d-core')}", _status(outcome)
    counts = {"passed": outcome.count("passed"), "failed": outcome.count("failed"), "incomplete": ""}
    right = f"{counts[status]} {status}".strip()
    first, second = (round(len(text) * _CHARACTER) + 2 * _MARGIN for text in (left, right))
    label = escape(f"{left}: {right}")
    texts = "".join(
        f'<text x="{begin + width / 2:g}" y="14" textLength="{width - 2 * _MARGIN}">{escape(text)}</text>'
        for begin, width, text in ((0, first, left), (first, second, right))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{first + second}" height="20" role="img">'
        f"<title>{label}</title>"
        f'<rect width="{first + second}" height="20" rx="3" fill="#444"/>'
        f'<rect x="{first}" width="{second}" height="20" rx="3" fill="{_COLOURS[status]}"/>'
        f'<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">{texts}</g></svg>\n'
    )


def write_badge(directory: Path, outcome: Outcome, today: date) -> list[Path]:
    """Write ``conformance.json`` and ``conformance.svg`` into a directory, which is created if it is absent.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    texts = {"conformance.json": json.dumps(facts(outcome, today), indent=1) + "\n", "conformance.svg": image(outcome)}
    for name, text in texts.items():
        (directory / name).write_text(text, "utf-8")
    return [directory / name for name in texts]


def _status(outcome: Outcome) -> str:
    if outcome.passed:
        return "passed"
    return "failed" if outcome.errors or outcome.count("failed") else "incomplete"
