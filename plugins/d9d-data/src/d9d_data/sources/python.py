"""Texts of the running Python installation: real prose and code that need no download.

The texts differ between Python versions, so measurements are comparable only within one version.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from functools import lru_cache
from pathlib import Path

from d9d_core.errors import DataError

from d9d_data.sources.opening import SourceFile

#: Tests (some hold invalid code on purpose) and installed packages are not part of the library's text.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def topics() -> list[str]:
    """Language reference as ``help()`` shows it, one document per topic (about 0.5 million characters).

    Raises:
        DataError: this Python lacks the reference.
    """
    try:
        from pydoc_data.topics import topics as texts
    except ImportError as error:
        raise DataError(
            "data.sources: this Python has no pydoc_data.topics, so 'python:topics' is empty; "
            "use 'python:docstrings' or files"
        ) from error
    return [texts[name] for name in sorted(texts)]


def topics_file() -> list[SourceFile]:
    """Source file of the topics, which are not stored in a file."""
    return [SourceFile("python:topics", "topics")]


def sources() -> list[SourceFile]:
    """Modules of the standard library in Python, one document per file (about 12 million characters)."""
    return [SourceFile(str(path), "text") for path in _library()]


def docstrings() -> list[SourceFile]:
    """Docstrings of the standard library, one document per module (about 1.7 million characters)."""
    return [SourceFile(str(path), "docstrings") for path in _library()]


def kinds() -> list[SourceFile]:
    """Docstrings of the standard library as records of ``text`` and ``label``: module, class or function."""
    return [SourceFile(str(path), "kinds") for path in _library()]


@lru_cache(maxsize=4096)  # parsing is slow, and a corpus is read twice: to train a tokenizer, and to encode
def docstrings_in(source: bytes, name: str) -> str:
    """Docstrings of a Python source, without indentation and joined by empty lines; the source is not imported.

    Args:
        source: contents of the file.
        name: name of the file, for error messages.

    Raises:
        DataError: the source is not valid Python.
    """
    return "\n\n".join(text for _, _, text in kinds_in(source, name))


def kinds_in(source: bytes, name: str) -> list[tuple[str, int, str]]:
    """Docstrings of a Python source file: the kind of object (module, class, function), its line, and the text.

    Args:
        source: contents of the file.
        name: name of the file, for error messages.

    Raises:
        DataError: the source is not valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide warnings about the library's own code
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError) as error:
            raise DataError(f"data.sources: {name} is not valid Python ({error})") from error
    found: list[tuple[str, int, str]] = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _DEFINITIONS) and (text := ast.get_docstring(node)):
            found.append((_KINDS.get(type(node), "function"), getattr(node, "lineno", 1), text))
        # Definitions occur only in statements, so expressions, the bulk of the tree, are skipped.
        pending += reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS)])
    return found


_KINDS: dict[type[ast.AST], str] = {ast.Module: "module", ast.ClassDef: "class"}
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def _library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"data.sources: the standard library in {root} has no .py files; use files of your own")
    return sorted(files)
