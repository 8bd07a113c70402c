"""Resolution of the job file's list of sources to files."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from d9d_core.errors import DataError

from d9d_data.sources import python
from d9d_data.sources.opening import SourceFile, file_system, is_address
from d9d_data.sources.tables import saved_dataset_files

_PYTHON: Mapping[str, Callable[[], list[SourceFile]]] = {
    "python:topics": python.topics_file,
    "python:docstrings": python.docstrings,
    "python:sources": python.sources,
    "python:kinds": python.kinds,
}
#: Prefix of the name of a directory saved by the library ``datasets``.
SAVED_DATASET = "hf:"
_Name = TypeVar("_Name", str, Path)


#: Largest number of files of one source; a directory with more is most likely named by mistake.
MAX_FILES = 1_000_000
#: Number of found files at which a search is reported, and again at each tenfold number.
_MANY = 10_000


def _silent(_text: str) -> None:
    """Ignore a line that would be printed."""


def find_files(sources: Sequence[str], note: Callable[[str], None] = _silent) -> list[SourceFile]:
    """List the files of all sources: sources in the given order, files of a source sorted by name.

    The files of a saved dataset are in the order of its rows.

    Args:
        sources: names of sources in the job file.
        note: function that prints a line if a search finds many files.

    Raises:
        DataError: a path does not exist or cannot be read, a glob matches no file, a directory has no file, or there
            are too many files.
    """
    return [file for index, source in enumerate(sources) for file in _of_source(source, index, note)]


def _of_source(source: str, index: int, note: Callable[[str], None]) -> list[SourceFile]:
    if source in _PYTHON:
        return _PYTHON[source]()
    where = f"data.sources[{index}]"
    try:
        if source.startswith(SAVED_DATASET):
            names = saved_dataset_files(source.removeprefix(SAVED_DATASET))
            return [SourceFile(name, "arrow") for name in names]
        if is_address(source):
            return [SourceFile.of(address) for address in _remote_files(source, where, note)]
        return [SourceFile.of(file) for file in _files(source, where, note)]
    except (OSError, RuntimeError, ValueError, RecursionError) as error:
        # Causes: a name that the system refuses, missing permission, an unknown home directory or a zero byte.
        reason = getattr(error, "strerror", None) or error
        shown = source if len(source) <= 80 else f"{source[:80]}..."
        raise DataError(f"{where}: cannot look for {shown!r}: {reason}; give a path that you may read") from error


def _remote_files(source: str, where: str, note: Callable[[str], None]) -> list[str]:
    system, path = file_system(source)
    try:
        names = sorted(_counted(_remote_names(system, path), f"{where}: {source}", note))
    except DataError:
        raise
    except Exception as error:  # storage libraries define own errors, such as for credentials
        raise DataError(f"{where}: cannot list {source}: {error}; check the address and the credentials") from error
    if not names:
        raise DataError(f"{where}: no file at {source}; check the address")
    return [system.unstrip_protocol(name) for name in names]


def _remote_names(system: Any, path: str) -> Iterator[str]:
    if glob.has_magic(path):
        wanted = path.rpartition("/")[2].startswith(".")
        for name, info in system.glob(path, detail=True).items():
            if info["type"] == "file" and (wanted or not _hidden(name.rpartition("/")[2])):
                yield name
    elif system.isfile(path):
        yield path
    else:
        base = path.rstrip("/") + "/"
        yield from (name for name in system.find(path) if not _hidden(name.removeprefix(base)))


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _files(source: str, where: str, note: Callable[[str], None]) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        if (
            all((path / name).is_file() for name in ("state.json", "dataset_info.json"))
            or (path / "dataset_dict.json").is_file()
        ):
            raise DataError(f"{where}: {path} seems to be saved by the library 'datasets'; write 'hf:{source}'")
        files = _counted(_walk(path), f"{where}: {path.absolute()}", note)
        if not files:
            raise DataError(f"{where}: the directory {path} has no files; put text files into it or name another")
    elif glob.has_magic(source):
        matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = _counted((Path(match) for match in matches if Path(match).is_file()), f"{where}: {path}", note)
        if not files:
            raise DataError(f"{where}: no file matches {source!r} (from {Path.cwd()}); '**' matches any folders")
    elif path.exists():
        raise DataError(f"{where}: {source!r} is no regular file; name a file or a directory")
    else:
        raise DataError(f"{where}: {source!r} does not exist (from {Path.cwd()}); {_nearest(path)}")
    return sorted(files)


def _walk(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory, in no order, without hidden files and directories."""
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if not name.startswith(".") and (file := Path(folder, name)).is_file())


def _counted(files: Iterable[_Name], where: str, note: Callable[[str], None]) -> list[_Name]:
    found: list[_Name] = []
    told = _MANY
    for file in files:
        found.append(file)
        if len(found) == told:
            note(f"{where} has {told:,} files, and the search continues")
            told *= 10
        if len(found) > MAX_FILES:
            raise DataError(
                f"{where} has more than {MAX_FILES:,} files; name the folder of the corpus, a glob such as "
                "'corpus/**/*.txt', or join the files to fewer"
            )
    return found


def _nearest(path: Path) -> str:
    """Hint about a missing path: the contents of the deepest parent directory that exists."""
    existing = next((parent for parent in path.parents if parent.is_dir()), None)
    if existing is None:
        return "check the spelling"
    names = sorted(child.name for child in existing.iterdir())
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{existing.resolve()} holds: {shown or 'nothing'}"
