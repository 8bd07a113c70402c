"""Consoles for commands' output, with control characters escaped and long lines wrapped with a hanging indent."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from d9d_core.untrusted import visible

__all__ = ["console_for", "key_value_table"]

#: Number of spaces before the second and later lines of a wrapped text.
_INDENT = 4
#: Width in characters of the names in a table of names and texts: the longest are ``undecided`` and ``predicted``.
_NAMES = 9


class VisibleConsole(Console):
    """Console that escapes control characters in printed text; only the console's own styles emit them."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Render an object to segments, with escapes instead of control characters."""
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print objects; a single text is wrapped with a hanging indent, so that lists keep their levels."""
        if len(objects) == 1 and isinstance(objects[0], str | Text) and not settings.get("soft_wrap"):
            text = Text(objects[0]) if isinstance(objects[0], str) else objects[0]
            objects = (Text("\n").join(_hanging(line, self) for line in text.split("\n", allow_blank=True)),)
        super().print(*objects, **settings)


def key_value_table() -> Table:
    """Table of names and texts, without border lines; a fixed width of the first column aligns a command's tables."""
    table = Table(box=None, show_header=False)
    table.add_column(min_width=_NAMES)
    table.add_column()
    return table


def folded(text: str) -> str:
    """Text with line breaks and a hanging indent if standard output is a terminal that is narrower than the text."""
    if not sys.stdout.isatty():
        return text
    console = Console(width=get_terminal_size().columns)
    return "\n".join(_hanging(Text(line), console).plain for line in text.split("\n"))


def _hanging(line: Text, console: Console) -> Text:
    """Wrap a line; its continuation is indented by four characters more than its beginning."""
    if line.cell_len <= console.width:
        return line
    indent = " " * min(len(line.plain) - len(line.plain.lstrip(" ")) + _INDENT, console.width // 2)
    first = line.wrap(console, console.width)[0]
    first.rstrip()
    rest = line[len(first) :]
    rest = rest[len(rest.plain) - len(rest.plain.lstrip()) :]
    lines = [first]
    for part in rest.wrap(console, console.width - len(indent)):
        part.rstrip()
        lines.append(Text.assemble(indent, part))
    return Text("\n").join(lines)


def console_for() -> Console:
    """Console on standard output that prints text literally: plugins may print brackets, or words between colons.

    Lines for a pipe are not wrapped.
    """
    width = None if sys.stdout.isatty() else 10_000
    return VisibleConsole(width=width, markup=False, highlight=False, emoji=False)
