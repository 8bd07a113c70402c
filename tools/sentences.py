"""Counts phrases that make prose hard to read, in docstrings, comments, messages and pages.

    uv run python tools/sentences.py            counts of the whole repository
    uv run python tools/sentences.py PATH...    each place below these files and folders, then the counts

The limits are the counts of today, so that one more fails; lower a limit after you have removed some. PyTorch's
documentation and other well-read projects have at least as many in 10,000 words.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Names of code in a text.
_CODE = re.compile(r"(`+)[^`]+\1")
#: Word in place of code, and of the computed parts of an f-string: without it, "that `x` of" would read "that of".
_PLACEHOLDER = "X"
#: Begin or end of a code block; a line with inline code may begin with three backticks, too.
_FENCE = re.compile(r"\s*(```+|~~~+)[^`]*$")
#: Line after which indented paragraphs are prose: an item of a list, or a note.
_ITEM = re.compile(r"\s*([-*+]|\d+\.|!!!) ")
#: Names and keys.
_NAME = re.compile(r"\S*[/_=@:-]\S*|[a-z0-9.]*")
#: Phrase -> most occurrences in the repository.
LIMITS = {
    "what the": 4,
    "what is": 8,
    "what a": 3,
    "what it": 18,
    "what they": 3,
    "those of": 1,
    "that of": 0,
    "beside": 29,
    "nobody": 0,
    "everybody": 0,
    "somebody": 0,
    "whoever": 0,
}
#: Files whose phrases are data, not prose.
EXCLUDED = ("tools/sentences.py", "tests/test_sentences.py")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Passage:
    """Passage of prose.

    Attributes:
        file: path from the root of the repository.
        line: line on which the passage begins.
        text: words of the passage, without line breaks.
    """

    file: str
    line: int
    text: str

    def found(self, phrase: str) -> int:
        """Number of occurrences of a phrase."""
        return len(re.findall(rf"\b{phrase}\b", self.text, re.IGNORECASE))


def passages(file: str, source: str) -> Iterator[Passage]:
    """Docstrings, comments and messages of a Python file, or the paragraphs of a page without code blocks."""
    found = _python(source) if file.endswith(".py") else _page(source)
    for line, text in found:
        yield Passage(file, line, " ".join(_CODE.sub(_PLACEHOLDER, text).split()))


def _page(source: str) -> Iterator[tuple[int, str]]:
    code = in_item = False
    paragraph: list[str] = []
    begin = 1
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if _FENCE.match(line):
            code = not code
        elif code or (line.startswith("    ") and not in_item):
            continue
        elif line.startswith("|"):
            yield number, line
        elif line.strip():
            in_item = bool(_ITEM.match(line)) or (in_item and line[0] == " ")
            begin = begin if paragraph else number
            paragraph.append(line)
        elif paragraph:
            yield begin, " ".join(paragraph)
            paragraph = []


def _python(source: str) -> Iterator[tuple[int, str]]:
    parts: set[ast.AST] = set()  # parts of f-strings, and their formats; ast.walk() gives the f-string before them
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner = (part for value in node.values for part in (value, getattr(value, "format_spec", None)))
            texts = (part.value if isinstance(part, ast.Constant) else _PLACEHOLDER for part in node.values)
            text = "".join(map(str, texts))
            if node not in parts and not _NAME.fullmatch(text):
                yield node.lineno, text
            parts.update(part for part in inner if part is not None)
        elif node in parts:
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not _NAME.fullmatch(node.value):
            yield node.lineno, node.value
    comment: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1 and comment:
            yield begin, " ".join(comment)
            comment = []
        begin, last = (begin if comment else token.start[0]), token.start[0]
        comment.append(token.string.lstrip("#: "))
    if comment:
        yield begin, " ".join(comment)


def repository(paths: Sequence[str] = ()) -> list[Passage]:
    """Passages of the tracked files, or of the tracked files below the given paths."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.splitlines() if name.endswith((".py", ".md")) and name not in EXCLUDED]
    texts = ((name, ROOT / name) for name in files)
    return [found for name, path in texts if path.exists() for found in passages(name, path.read_text("utf-8"))]


def counts(found: Sequence[Passage]) -> dict[str, int]:
    """Occurrences of each phrase."""
    return {phrase: sum(passage.found(phrase) for passage in found) for phrase in LIMITS}


def main(paths: Sequence[str]) -> None:
    """Print the places and the counts of all phrases; exit with 1 if the repository exceeds a limit."""
    found = repository(paths)
    if not found:
        raise SystemExit(f"no tracked .py or .md file below {', '.join(paths)}")
    for passage in found if paths else ():
        for phrase in LIMITS:
            if passage.found(phrase):
                print(f"{passage.file}:{passage.line}: {phrase}: {_around(passage.text, phrase)}")
    total = counts(found)
    for phrase, count in total.items():
        print(f"{phrase:12} {count:4}   at most {LIMITS[phrase]} in the repository")
    if not paths and any(count > LIMITS[phrase] for phrase, count in total.items()):
        sys.exit(1)


def _around(text: str, phrase: str) -> str:
    match = re.search(rf".{{0,60}}\b{phrase}\b.{{0,60}}", text, re.IGNORECASE)
    return match.group() if match else ""


if __name__ == "__main__":
    main(sys.argv[1:])
