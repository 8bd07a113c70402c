"""Opening of source files, local or at an fsspec address, compressed or not, with bounded memory."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, BinaryIO, cast

from d9d_core.errors import DataError

#: Suffix of a compressed file -> name of the compression.
COMPRESSIONS = {".gz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst"}
#: Suffix of a structured file -> name of its format. Every other file is plain text.
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_BUFFER = 1 << 18  # bytes
#: Limits of a file's decompressed bytes: any file may have ``CONTENT`` bytes, a larger one ``CONTENT_RATIO`` for each
#: compressed byte. Repetitive texts compress well, but without a limit a small file could fill the disk.
CONTENT, CONTENT_RATIO = 1 << 27, 200
# In the standard library since Python 3.14.
_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Source file of a corpus: address, format and compression.

    Attributes:
        address: local path, or address for fsspec such as ``s3://bucket/a.jsonl``.
        format: ``text``, ``docstrings``, ``kinds``, ``topics`` or a value of :data:`FORMATS`.
        compression: a value of :data:`COMPRESSIONS`, or empty.
    """

    address: str
    format: str
    compression: str = ""

    @classmethod
    def of(cls, address: str | Path) -> SourceFile:
        """File at an address, with format and compression taken from its suffixes."""
        suffixes = [suffix.lower() for suffix in PurePosixPath(str(address)).suffixes[-2:]]
        compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
        if compression:
            suffixes.pop()
        return cls(str(address), FORMATS.get(suffixes[-1], "text") if suffixes else "text", compression)

    @property
    def name(self) -> str:
        """Name of the file in messages."""
        return self.address


@dataclass(frozen=True, slots=True)
class FileStat:
    """Size of a file in bytes, and a string that changes when the file is written; empty if the storage has none."""

    size: int
    modified: str


def is_address(name: str) -> bool:
    """Whether a name is an fsspec address rather than a local path."""
    return "://" in name


def file_system(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path in it.

    Raises:
        DataError: fsspec does not know the scheme of the address, or the package for it is missing.
    """
    import fsspec  # type: ignore[import-untyped]

    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise DataError(f"data.sources: cannot open {address}: {error}") from error
    return system, path


def stat_file(address: str) -> FileStat:
    """Size and modification time of a file, without reading it.

    Raises:
        DataError: the file is missing, or is not a regular file.
    """
    with _explained(address):
        if is_address(address):
            system, path = file_system(address)
            info = system.info(path)
            keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
            return FileStat(int(info["size"]), str(next((info[key] for key in keys if info.get(key)), "")))
        status = Path(address).stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        return FileStat(status.st_size, str(status.st_mtime_ns))


def read_blocks(address: str, begins: Sequence[int], size: int) -> Iterator[bytes]:
    """Yield blocks of a source file's stored bytes, without reading the bytes between them.

    Args:
        address: path or address of the file.
        begins: first byte of each block.
        size: bytes of a block.

    Raises:
        DataError: the file cannot be read.
    """
    if is_address(address):  # an open fsspec file reads megabytes ahead
        with _explained(address):
            system, path = file_system(address)
            for begin in begins:
                yield system.cat_file(path, start=begin, end=begin + size)
        return
    with open_stored(address) as stored:
        for begin in begins:
            stored.seek(begin)
            yield stored.read(size)


def check_content(name: str, content: int, stored: int) -> None:
    """Raise if the decompressed content of a file is too large for the size of the file.

    Args:
        name: name of the file.
        content: number of decompressed bytes read so far.
        stored: size of the file in bytes.

    Raises:
        DataError: the content exceeds the limit.
    """
    limit = max(CONTENT, CONTENT_RATIO * stored)
    if content > limit:
        raise DataError(
            f"data.sources: {name} has {stored:,} bytes but decompresses to more than {limit:,}; store it without "
            "compression, or remove it from the sources"
        )


class _Bounded(io.RawIOBase):
    """Decompressed content of a file, limited by :func:`check_content`."""

    def __init__(self, content: BinaryIO, address: str) -> None:
        self._content, self._address, self._stored = content, address, stat_file(address).size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(len(buffer))
        buffer[: len(data)] = data
        check_content(self._address, self._content.tell(), self._stored)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._content.seek(offset, whence)

    def tell(self) -> int:
        return self._content.tell()


@contextmanager
def open_stored(address: str) -> Iterator[BinaryIO]:
    """Open a file for reading its stored bytes.

    Raises:
        DataError: the file cannot be opened, or reading in the ``with`` block fails.
    """
    with _explained(address), _opened(address) as file:
        yield file


@contextmanager
def open_content(file: SourceFile) -> Iterator[BinaryIO]:
    """Open a file for reading its decompressed bytes.

    Raises:
        DataError: the file cannot be opened, or the ``with`` block finds it unreadable, damaged, truncated, or too
            large when decompressed.
    """
    with open_stored(file.address) as stored, _explained(file.address), _decompressed(file, stored) as content:
        yield content


def _opened(address: str) -> BinaryIO:
    if is_address(address):
        system, path = file_system(address)
        # fsspec files do not support readline(limit); BufferedReader does.
        return cast("BinaryIO", io.BufferedReader(system.open(path, "rb"), _BUFFER))
    stat_file(address)  # raises for a named pipe, which would block
    return Path(address).open("rb")


def _decompressed(file: SourceFile, stored: BinaryIO) -> BinaryIO:
    content: Any
    match file.compression:
        case "gz":
            content = gzip.GzipFile(fileobj=stored)
        case "bz2":
            content = bz2.BZ2File(stored)
        case "xz":
            content = lzma.LZMAFile(stored)  # noqa: SIM115 - closed with its reader
        case "zst":
            content = _zstd(file.name).ZstdFile(stored)
        case _:
            return stored
    return io.BufferedReader(_Bounded(content, file.address), _BUFFER)


def _zstd(name: str) -> ModuleType:
    try:
        return importlib.import_module(_ZSTD)
    except ImportError as error:
        raise DataError(f"data.sources: {name} is compressed with zstd: pip install 'd9d-data[zstd]'") from error


def _damage() -> tuple[type[Exception], ...]:
    zstd = sys.modules.get(_ZSTD)  # if never imported, it raised nothing
    known = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    return known if zstd is None else (*known, zstd.ZstdError)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Context in which errors of the libraries become errors that name the file and the next action."""
    try:
        yield
    except _damage() as error:
        raise DataError(
            f"data.sources: {name} is damaged or cut off ({error}); copy it again, or remove it from the sources"
        ) from error
    except OSError as error:
        raise DataError(
            f"data.sources: cannot read {name}: {error.strerror or error}; "
            "make the file readable or remove it from the sources"
        ) from error
