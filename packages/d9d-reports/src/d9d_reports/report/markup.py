"""HTML tables, formatted numbers and times, and the reading of a run's JSON files of facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from d9d_core.untrusted import parse_json, read_regular


def table(rows: Iterable[Sequence[object]], titles: Sequence[str] = ()) -> str:
    """Make an HTML table of escaped texts; the first cell of a row is its title. Empty without rows.

    A table with two columns and no titles is shown as pairs, which stand below each other on a narrow screen.
    """
    lines = [[escape(str(cell)) for cell in row] for row in rows]
    if not lines:
        return ""
    heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    head = f"<thead><tr>{heads}</tr></thead>" if titles else ""
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in lines
    )
    kind = ' class="pairs"' if not titles and all(len(row) == 2 for row in lines) else ""
    return f'<div class="wide"><table{kind}>{head}<tbody>{body}</tbody></table></div>'


def folded(title: str, says: str, content: str) -> str:
    """Make a folded section whose summary line has a title and a brief description of the contents."""
    rest = f' <span class="weak">{escape(says)}</span>' if says else ""
    return f"<details><summary><b>{escape(title)}</b>{rest}</summary>\n{content}\n</details>"


def number(value: float | None) -> str:
    """Format a number with four significant digits, or as a whole number from 1,000 on; empty for ``None``."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format seconds with at most two units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def read_facts(path: Path) -> Mapping[str, Any]:
    """Read a JSON file of a run; empty if the file is missing or damaged."""
    try:
        values = parse_json(read_regular(path, links="near"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
