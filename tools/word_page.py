"""Writes docs/words.md, words of other training tools with the words of d9d, and their paragraphs of docs/job-file.md.

    uv run python tools/word_page.py           write the pages
    uv run python tools/word_page.py --check   exit with 1 if one is out of date

The words come from d9d-core's table ``words.json``, which also gives the hints of error messages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from d9d_core.registry.hooks import KINDS
from d9d_core.words import ANY, Row, topics

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "words.md"
JOB_FILE = ROOT / "docs" / "job-file.md"
MARKS = "<!-- words: written by tools/word_page.py -->", "<!-- end of words -->"
KIND_OF_NEW_JOB = "kind of new job"
_BLOCK = re.compile(rf"\n{MARKS[0]}.*?{MARKS[1]}\n", re.DOTALL)
HEAD = """# Words of other tools

Words of other training tools, each with the word of d9d. An error message about one of these words gives the same hint,
whether the word is in a job file, in `--set`, or a command. Upper and lower case make no difference there, nor do `-`
and `_`. The pages [job file](job-file.md) and [fields of components](fields.md) describe the fields of d9d; the
[glossary](glossary.md) describes concepts. Written by `tools/word_page.py` from `words.json` of
[d9d-core](../packages/d9d-core/README.md).
"""


def page() -> str:
    """Text of the page."""
    found = list(topics())
    names = ", ".join(f"[{topic}](#{_anchor(topic)})" for topic, _ in found)
    lines = [HEAD, f"Topics: {names}.\n"]
    for topic, rows in found:
        lines += [f"## {topic}\n", "| elsewhere | d9d | tools |", "|---|---|---|"]
        lines += [f"| {_elsewhere(row)} | {_ours(row)} | {', '.join(row.tools)} |" for row in rows]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _anchor(topic: str) -> str:
    return topic.lower().replace(",", "").replace(" ", "-")


def _elsewhere(row: Row) -> str:
    """Spellings, after the place where they are typed unless that is any section of the job file."""
    place, _, of = row.at.partition(" of ")
    words = ", ".join(f"`{word}`" for word in row.words)
    if row.at.partition(" ")[0] == "command":
        return ", ".join(f"`{row.at.replace('command', 'd9d', 1)} {word}`" for word in row.words)
    if row.at == KIND_OF_NEW_JOB:
        return ", ".join(f"`d9d new job {word}`" for word in row.words)
    if row.at.partition(" ")[0] == "option":
        command = row.at.replace("option", "d9d", 1) if " " in row.at else ""
        return ", ".join(
            f"`{command} {'-' if len(word) == 1 else '--'}{word}`".replace("` ", "`") for word in row.words
        )
    if place == "value":
        return f"value of `{of}`: {'any text or number' if row.words == (ANY,) else words}"
    if row.at == "field":
        return words
    if place == "field":
        return f"field of {of if ' ' in of else f'`{of}`'}: {words}"
    return f"name in `{next(kind.section for kind in KINDS if kind.name == row.at)}`: {words}"


def spellings(ours: str) -> str:
    """Words of other tools for a field, such as ``optimizer.lr``, or a component; empty if there are none."""
    rows = [row for _, some in topics() for row in some if row.ours == ours and ANY not in row.words]
    words = dict.fromkeys(word for row in rows for word in row.words if word != ours.rpartition(".")[2])
    return ", ".join(f"`{word}`" for word in words)


def job_file() -> str:
    """Text of docs/job-file.md, in which a paragraph with words of other tools follows each table of fields."""
    text = _BLOCK.sub("", JOB_FILE.read_text("utf-8"))
    return re.sub(r"\| field \| default \| meaning \|\n(\|.*\n)+", _with_words, text)


def _with_words(table: re.Match[str]) -> str:
    fields = re.findall(r"^\| `([\w.]+)` ", table[0], re.MULTILINE)
    found = [f"`{field}` ({words})" for field in fields if (words := spellings(field))]
    if not found:
        return table[0]
    return f"{table[0]}\n{MARKS[0]}\nIn [other tools](words.md): {'; '.join(found)}.\n{MARKS[1]}\n"


def _ours(row: Row) -> str:
    note = row.note.replace("|", "\\|").replace("<", "&lt;")
    if row.ours is None:
        return f"none: {note}"
    ours = f"`{row.ours}`".replace("|", "\\|")
    return f"{ours}; {note}" if note else ours


def main() -> None:
    """Write or check the page."""
    if set(sys.argv[1:]) - {"--check"}:
        raise SystemExit(__doc__)
    texts = {PAGE: page(), JOB_FILE: job_file()}
    if "--check" not in sys.argv[1:]:
        for file, text in texts.items():
            file.write_text(text, "utf-8", newline="\n")
        return
    for file, text in texts.items():
        if not file.is_file() or text != file.read_text("utf-8"):
            raise SystemExit(f"docs/{file.name} is out of date; run: uv run python tools/word_page.py")


if __name__ == "__main__":
    main()
