"""Texts of the running Python installation: real prose and code that need no download.

They differ between Python versions, so numbers measured on them hold for one version only.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from functools import cached_property
from pathlib import Path

from d9d_core.extend import DataError

from d9d_data.sources.document import Document, FileDocument, InlineDocument

#: Neither tests (some hold invalid code on purpose) nor installed packages belong to the library's text.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def topics() -> list[Document]:
    """Language reference as ``help()`` shows it, one document per topic (about 0.5 million characters)."""
    try:
        from pydoc_data.topics import topics as texts
    except ImportError as error:
        raise DataError(
            "data.sources: this Python has no pydoc_data.topics, so 'python:topics' is empty; "
            "use 'python:docstrings' or files"
        ) from error
    return [InlineDocument(f"python:topics/{name}", texts[name]) for name in sorted(texts)]


def sources() -> list[Document]:
    """Modules of the standard library in Python, one document per file (about 12 million characters)."""
    return [FileDocument(path) for path in _library()]


def docstrings() -> list[Document]:
    """Docstrings of the standard library, one document per module (about 1.7 million characters)."""
    return [DocstringsOf(FileDocument(path)) for path in _library()]


class DocstringsOf:
    """Source document of the docstrings of one Python file, found without importing it."""

    def __init__(self, file: FileDocument) -> None:
        self._file = file

    @property
    def name(self) -> str:
        """Path of the file."""
        return self._file.name

    @property
    def kind(self) -> str:
        """Kind of the docstrings of a file."""
        return "docstrings"

    def raw(self) -> bytes:
        """Bytes of the file."""
        return self._file.raw()

    def text(self) -> str:
        """Docstrings, cleaned of their indentation, with empty lines between them."""
        return self._text

    @cached_property
    def _text(self) -> str:  # parsing is slow, and a corpus is read twice: to train a tokenizer, and to encode
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code are not our news
            try:
                tree = ast.parse(self.raw())
            except (SyntaxError, ValueError) as error:
                raise DataError(f"data.sources: {self.name} is not valid Python ({error})") from error
        texts: list[str] = []
        pending: list[ast.AST] = [tree]
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                texts.append(ast.get_docstring(node) or "")
            # Definitions only stand in statements, so expressions, the bulk of the tree, need no visit.
            pending += reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS)])
        return "\n\n".join(text for text in texts if text)


_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def _library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"data.sources: the standard library in {root} has no .py files; use files of your own")
    return sorted(files)
