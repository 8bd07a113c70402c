"""Resolution of the job file's list of sources to documents."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from d9d_core.extend import DataError

from d9d_data.sources import python
from d9d_data.sources.document import Document, FileDocument, lines_of

_PYTHON: Mapping[str, Callable[[], list[Document]]] = {
    "python:topics": python.topics,
    "python:docstrings": python.docstrings,
    "python:sources": python.sources,
}


#: Files of one source. Whoever names a folder with more means another one.
MAX_FILES = 1_000_000
#: Files after which a search is reported, and again after ten times as many.
_MANY = 10_000


def _silent(_text: str) -> None:
    """Drop a note."""


def find_documents(
    sources: Sequence[str], lines: bool = False, note: Callable[[str], None] = _silent
) -> list[Document]:
    """Documents of all sources: sources in their order, files sorted by name.

    Args:
        sources: names of sources in the job file.
        lines: the lines of ``.jsonl`` files are documents; else they are texts like any other.
        note: told which folder is searched, if that finds many files.

    Raises:
        DataError: a path does not exist, a glob matches no file, a directory holds none, or more than a corpus has.
    """
    return [document for index, source in enumerate(sources) for document in _of_source(source, index, lines, note)]


def _of_source(source: str, index: int, lines: bool, note: Callable[[str], None]) -> list[Document]:
    if source in _PYTHON:
        return _PYTHON[source]()
    where = f"data.sources[{index}]"
    try:
        return [document for file in _files(source, where, note) for document in _of_file(file, lines)]
    except (OSError, RuntimeError, ValueError, RecursionError) as error:
        # a name the system refuses, no permission, an unknown home directory, a zero byte
        reason = getattr(error, "strerror", None) or error
        shown = source if len(source) <= 80 else f"{source[:80]}..."
        raise DataError(f"{where}: cannot look for {shown!r}: {reason}; give a path that you may read") from error


def _of_file(file: Path, lines: bool) -> list[Document]:
    return lines_of(file) if lines and file.suffix == ".jsonl" else [FileDocument(file)]


def _files(source: str, where: str, note: Callable[[str], None]) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _counted(_walk(path), f"{where}: {path.absolute()}", note)
        if not files:
            raise DataError(f"{where}: the directory {path} holds no file; put text into it or name another")
    elif glob.has_magic(source):
        matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = _counted((Path(match) for match in matches if Path(match).is_file()), f"{where}: {path}", note)
        if not files:
            raise DataError(f"{where}: no file matches {source!r} (from {Path.cwd()}); '**' matches any folders")
    else:
        raise DataError(f"{where}: {source!r} does not exist (from {Path.cwd()}); {_nearest(path)}")
    return sorted(files)


def _walk(directory: Path) -> Iterator[Path]:
    """Files below a directory, in no order, without those that are hidden or in a hidden directory."""
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if not name.startswith(".") and (file := Path(folder, name)).is_file())


def _counted(files: Iterable[Path], where: str, note: Callable[[str], None]) -> list[Path]:
    found: list[Path] = []
    told = _MANY
    for file in files:
        found.append(file)
        if len(found) == told:
            note(f"{where} has {told:,} files, and the search goes on")
            told *= 10
        if len(found) > MAX_FILES:
            raise DataError(
                f"{where} has more than {MAX_FILES:,} files; name the folder of the corpus, a glob such as "
                "'corpus/**/*.txt', or join them to fewer"
            )
    return found


def _nearest(path: Path) -> str:
    """Longest existing part of a missing path."""
    existing = next((parent for parent in path.parents if parent.is_dir()), None)
    if existing is None:
        return "check the spelling"
    names = sorted(child.name for child in existing.iterdir())
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{existing.resolve()} holds: {shown or 'nothing'}"
