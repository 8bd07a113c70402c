"""Counts phrases that make prose hard to read, in docstrings, comments, messages and pages.

    uv run python tools/sentences.py            counts of the whole repository, each per 10,000 words
    uv run python tools/sentences.py PATH...    each place below these files and folders, then the counts

The limits are the highest rates in the documentation of PyTorch and of other well-read projects: up to 1.2 times
"what the" in 10,000 words, 0.5 times "what is", 0.3 times "those of", and never "nobody" or "whoever".
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Names of code in a text.
_CODE = re.compile(r"``[^`]+``|`[^`]+`")
#: Phrase -> most occurrences in 10,000 words.
LIMITS = {
    "what the": 1.2,
    "what is": 0.5,
    "what a": 0.5,
    "what it": 1.0,
    "what they": 0.5,
    "those of": 0.3,
    "that of": 0.5,
    "beside": 1.0,
    "nobody": 0.0,
    "everybody": 0.0,
    "somebody": 0.0,
    "whoever": 0.0,
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
        yield Passage(file, line, " ".join(_CODE.sub("", text).split()))


def _page(source: str) -> Iterator[tuple[int, str]]:
    code = False
    paragraph: list[str] = []
    begin = 1
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif code or line.startswith("    "):
            continue
        elif line.startswith("|"):
            yield number, line
        elif line.strip():
            begin = begin if paragraph else number
            paragraph.append(line)
        elif paragraph:
            yield begin, " ".join(paragraph)
            paragraph = []


def _python(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        # Strings without a space are names and keys, not prose.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
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


def rates(found: Sequence[Passage]) -> dict[str, float]:
    """Occurrences of each phrase per 10,000 words."""
    words = sum(len(passage.text.split()) for passage in found)
    counts = Counter({phrase: sum(passage.found(phrase) for passage in found) for phrase in LIMITS})
    return {phrase: 10_000 * counts[phrase] / max(1, words) for phrase in LIMITS}


def main(paths: Sequence[str]) -> None:
    """Print the places and the rates of all phrases; exit with 1 if the repository exceeds a limit."""
    found = repository(paths)
    if not found:
        raise SystemExit(f"no tracked .py or .md file below {', '.join(paths)}")
    for passage in found if paths else ():
        for phrase in LIMITS:
            if passage.found(phrase):
                print(f"{passage.file}:{passage.line}: {phrase}: {_around(passage.text, phrase)}")
    for phrase, rate in rates(found).items():
        print(f"{phrase:12} {rate:5.1f}   at most {LIMITS[phrase]:.1f}")
    if not paths and any(rate > LIMITS[phrase] for phrase, rate in rates(found).items()):
        sys.exit(1)


def _around(text: str, phrase: str) -> str:
    match = re.search(rf".{{0,60}}\b{phrase}\b.{{0,60}}", text, re.IGNORECASE)
    return match.group() if match else ""


if __name__ == "__main__":
    main(sys.argv[1:])
