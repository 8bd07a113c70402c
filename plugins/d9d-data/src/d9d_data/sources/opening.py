"""Opening of source files: local ones or behind an fsspec address, compressed or not, with bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from d9d_core.extend import DataError

#: Suffix of a compressed file -> name of the compression.
COMPRESSIONS = {".gz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst"}
#: Suffix of a structured file -> name of its format. Every other file is text.
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
# A block of zstd makes at most 128 KiB out of 4 bytes: what comes out of one piece of input stays below 64 MiB.
_ZSTD_INPUT = 2048  # bytes
_BUFFER = 1 << 18  # bytes


@dataclass(frozen=True, slots=True)
class SourceFile:
    """File of a corpus.

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
        """File at an address, with the format and compression that its suffixes say."""
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
    """Size of a file in bytes, and a text that changes whenever it is written."""

    size: int
    modified: str


def is_address(name: str) -> bool:
    """Whether a name is an address for fsspec rather than a local path."""
    return "://" in name


def file_system(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path in it.

    Raises:
        DataError: no such file system is known, or its package is missing.
    """
    import fsspec  # type: ignore[import-untyped]

    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise DataError(f"data.sources: cannot open {address}: {error}") from error
    return system, path


def stat_file(address: str) -> FileStat:
    """Size and time of the last change of a file, without reading it.

    Raises:
        DataError: it is not there, or not a regular file.
    """
    with _explained(address):
        if is_address(address):
            system, path = file_system(address)
            info = system.info(path)
            keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
            return FileStat(int(info["size"]), str(next((info[key] for key in keys if info.get(key)), "")))
        status = Path(address).stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        return FileStat(status.st_size, str(status.st_mtime_ns))


def read_blocks(address: str, begins: Sequence[int], size: int) -> Iterator[bytes]:
    """Blocks of a file as it is stored, without reading what is between them.

    Args:
        address: of the file.
        begins: first byte of each block.
        size: bytes of a block.

    Raises:
        DataError: the file cannot be read.
    """
    if is_address(address):  # a file that is opened reads megabytes ahead
        with _explained(address):
            system, path = file_system(address)
            for begin in begins:
                yield system.cat_file(path, start=begin, end=begin + size)
        return
    with open_stored(address) as stored:
        for begin in begins:
            stored.seek(begin)
            yield stored.read(size)


@contextmanager
def open_stored(address: str) -> Iterator[BinaryIO]:
    """Open a file for reading its bytes as they are stored.

    Raises:
        DataError: it cannot be opened, or reading in the block fails.
    """
    with _explained(address), _opened(address) as file:
        yield file


@contextmanager
def open_content(file: SourceFile) -> Iterator[BinaryIO]:
    """Open a file for reading its bytes, decompressed as they are read.

    Raises:
        DataError: it cannot be opened; in the block, it cannot be read, or is no such compressed file, or is cut off.
    """
    with open_stored(file.address) as stored, _explained(file.address), _decompressed(file, stored) as content:
        yield content


def _opened(address: str) -> BinaryIO:
    if is_address(address):
        system, path = file_system(address)
        # Files of fsspec read lines of any length only.
        return cast("BinaryIO", io.BufferedReader(system.open(path, "rb"), _BUFFER))
    stat_file(address)  # a named pipe would be waited for
    return Path(address).open("rb")


def _decompressed(file: SourceFile, stored: BinaryIO) -> BinaryIO:
    match file.compression:
        case "gz":
            return cast("BinaryIO", gzip.GzipFile(fileobj=stored))
        case "bz2":
            return cast("BinaryIO", bz2.BZ2File(stored))
        case "xz":
            return cast("BinaryIO", lzma.LZMAFile(stored))
        case "zst":
            return cast("BinaryIO", io.BufferedReader(_ZstdStream(stored, file.name), _BUFFER))
    return stored


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a zstd file. The library's own reader takes a file that was cut off for a finished one."""

    def __init__(self, stored: BinaryIO, name: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"data.sources: {name} is compressed with zstd: pip install 'd9d-data[zstd]'") from error
        self._stored = stored
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            data = self._input or self._stored.read(_ZSTD_INPUT)
            self._input = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the file ends within compressed data")
                return 0
            if self._frame is None:
                self._frame = self._new()
            try:
                self._output = memoryview(self._frame.decompress(data))
            except self._error as error:
                raise OSError(str(error)) from error
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what the libraries raise into errors that name the file."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(
            f"data.sources: {name} is damaged or cut off ({error}); copy it again, or take it out of the sources"
        ) from error
    except OSError as error:
        raise DataError(
            f"data.sources: cannot read {name}: {error.strerror or error}; "
            "make the file readable or take it out of the sources"
        ) from error
