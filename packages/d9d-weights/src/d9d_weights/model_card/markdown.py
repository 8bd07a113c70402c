"""Markdown of untrusted texts, escaped so that, for example, a name from a job file cannot change the page."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from d9d_core.job_file.reading import write_yaml

_LONGEST = 300
#: Unicode categories of control characters, surrogates, and characters that reorder or hide text.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs"})
_PUNCTUATION = re.compile(r"[*_\[\]#~$!{}]")
#: Characters that would end a cell, begin HTML, code or a formula, or turn a name into a link. They become entities,
#: because renderers differ in the meaning of a backslash before them.
_ENTITIES = {character: f"&#{ord(character)};" for character in "&<>|`@\\"}


def inline(value: object) -> str:
    """Escape a text as one line of plain text for a heading, a paragraph or a table cell."""
    words = "".join(" " if c.isspace() else c for c in str(value) if c.isspace() or _is_visible(c)).split()
    line = " ".join(words)
    if len(line) > _LONGEST:
        line = line[: _LONGEST - 1] + "…"
    escaped = "".join(_ENTITIES.get(c, c) for c in line)
    escaped = _PUNCTUATION.sub(r"\\\g<0>", escaped.replace("&#", "\0")).replace("\0", "&#")
    return escaped.replace("://", "&#58;//").replace("www.", "www&#46;")


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; titles and cells are plain text."""
    lines = [titles, ["---"] * len(titles)]
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*texts, *("| " + " | ".join(map(inline, row)) + " |" for row in rows)])


def yaml_block(value: object) -> str:
    """Write a value as a code block in YAML."""
    text = yaml_text(value)
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text) or [""]))
    return f"{fence}yaml\n{text}{fence}"


def yaml_text(value: object) -> str:
    """Write a value as YAML, with invisible characters escaped."""
    # Lines are not folded: a folded line could begin with the end marker of the front matter.
    texts = (write_yaml(value, allow_unicode=plain, width=2**31) for plain in (True, False))
    return next(text for text in texts if text.isascii() or all(c == "\n" or _is_visible(c) for c in text))


def _is_visible(character: str) -> bool:
    return unicodedata.category(character) not in _INVISIBLE
