"""Resolution of the job file's list of sources to documents."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from d9d_core.extend import DataError

from d9d_data.sources import python
from d9d_data.sources.document import Document, FileDocument, lines_of

_PYTHON: Mapping[str, Callable[[], list[Document]]] = {
    "python:topics": python.topics,
    "python:docstrings": python.docstrings,
    "python:sources": python.sources,
}


def find_documents(sources: Sequence[str], lines: bool = False) -> list[Document]:
    """Documents of all sources: sources in their order, files sorted by name.

    Args:
        sources: names of sources in the job file.
        lines: the lines of ``.jsonl`` files are documents; else they are texts like any other.

    Raises:
        DataError: a path does not exist, a glob matches no file, a directory holds none.
    """
    return [document for index, source in enumerate(sources) for document in _of_source(source, index, lines)]


def _of_source(source: str, index: int, lines: bool) -> list[Document]:
    if source in _PYTHON:
        return _PYTHON[source]()
    where = f"data.sources[{index}]"
    try:
        return [document for file in _files(source, where) for document in _of_file(file, lines)]
    except (OSError, RuntimeError) as error:  # a name the system refuses, no permission, an unknown home directory
        reason = getattr(error, "strerror", None) or error
        shown = source if len(source) <= 80 else f"{source[:80]}..."
        raise DataError(f"{where}: cannot look for {shown!r}: {reason}; give a path that you may read") from error


def _of_file(file: Path, lines: bool) -> list[Document]:
    return lines_of(file) if lines and file.suffix == ".jsonl" else [FileDocument(file)]


def _files(source: str, where: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
        if not files:
            raise DataError(f"{where}: the directory {path} holds no file; put text into it or name another")
    elif glob.has_magic(source):
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            raise DataError(f"{where}: no file matches {source!r} (from {Path.cwd()}); '**' matches any folders")
    else:
        raise DataError(f"{where}: {source!r} does not exist (from {Path.cwd()}); {_nearest(path)}")
    return sorted(files)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _nearest(path: Path) -> str:
    """Longest existing part of a missing path."""
    existing = next((parent for parent in path.parents if parent.is_dir()), None)
    if existing is None:
        return "check the spelling"
    names = sorted(child.name for child in existing.iterdir())
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{existing.resolve()} holds: {shown or 'nothing'}"
