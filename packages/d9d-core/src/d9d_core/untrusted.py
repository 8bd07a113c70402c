"""Files and directories that somebody else may have made: what a directory is, and how its files are read.

A :class:`Place` says what a command was given, in one way for all commands. Files are regular ones of bounded size and
depth.

A checkpoint, a model or a corpus comes from anywhere. Whatever lies at its path, reading it ends soon, with a value or
with an :class:`OSError` or :class:`ValueError` whose text is for the user.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

__all__ = ["Place", "parse_json", "read_regular", "visible"]

#: Bytes of the largest JSON file that is parsed: an index of a million tensors has a third of it.
MAX_JSON_BYTES = 1 << 28
#: Levels of the deepest value; what walks over it must not reach the interpreter's own limit.
MAX_JSON_DEPTH = 200
#: Values of the largest JSON: each takes some 60 bytes of memory, and two of the file.
MAX_JSON_VALUES = 1 << 23
#: Digits of the largest whole number, which must not overflow where it is made a float.
_MAX_DIGITS = 300

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}
# The closing quote is optional, and nothing is given back: an endless string is scanned once, not again and again.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DEPTHS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS = bytes(set(range(256)) - set(b"[{]}"))


#: Characters that a terminal obeys or that reorder a line: controls but tab and newline, and marks of direction.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

#: Links that a file's name may be: any; those within its directory, or to the files of the Hugging Face cache; none.
Links = Literal["any", "near", "none"]


def visible(text: str) -> str:
    """Text for a terminal, with an escape in place of each character that would control it.

    Commands quote files of strangers: names of tensors, labels, values of a job, texts that a model writes.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def open_regular(path: str | Path, links: Links = "any") -> int:
    """Open an untrusted file for reading if it is a regular one, and return its descriptor. Never waits for a writer.

    Args:
        path: of the file.
        links: which links its name may be.

    Raises:
        OSError: it cannot be opened, or is a device, a named pipe, a directory, or a link that is not wanted.
    """
    # A named pipe that nobody writes to would be waited for, without O_NONBLOCK.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if links == "any" else os.O_NOFOLLOW)
    target = _target(path) if links == "near" else path
    try:
        descriptor = os.open(target, flags)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP and links != "any":
            raise OSError(errno.ELOOP, "it is a link, and must be a file of its own", str(path)) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        raise OSError(errno.EINVAL, f"it is a {kind}, and must be a regular file", str(path))
    return descriptor


def _target(path: str | Path) -> str:
    """Path without links, of a file whose name may be a link to one that belongs to it."""
    if not os.path.islink(path):  # noqa: PTH114 - a zero byte is a ValueError in both
        return str(path)
    directory, target = Path(os.path.realpath(Path(path).parent)), Path(os.path.realpath(path))
    # <cache>/models--x--y/snapshots/<revision>/config.json leads to ../../blobs/<hash>
    blobs = directory.parents[1] / "blobs" if directory.parent.name == "snapshots" else directory
    if directory not in target.parents and blobs not in target.parents:
        raise OSError(errno.ELOOP, "it is a link that leaves its directory; copy the file there", str(path))
    return str(target)


def read_regular(path: str | Path, limit: int = MAX_JSON_BYTES, links: Links = "any") -> bytes:
    """Contents of a regular file.

    Args:
        path: of the file.
        limit: most bytes that it may have.
        links: which links its name may be.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open(open_regular(path, links), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes, too many for such a file", str(path))
    return content


def parse_json(content: bytes, strict: bool = False, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse JSON of an untrusted file, in UTF-8, with or without a byte-order mark.

    Args:
        content: of the file.
        strict: whether names that appear twice in an object, NaN and infinity are refused. Published models have them.
        limit: most bytes that it may have.

    Raises:
        ValueError: it is no JSON, nested too deeply, or holds text or numbers that would fail later.
    """
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    structure = _STRING.sub(b"", content)
    if _depth(structure) > MAX_JSON_DEPTH:
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")
    if sum(map(structure.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"it holds more than {MAX_JSON_VALUES:,} values")
    del structure
    value = json.loads(
        content.decode("utf-8-sig"),
        parse_int=_whole,
        parse_float=_finite if strict else None,
        parse_constant=_no_constant if strict else None,
        object_pairs_hook=_once if strict else None,
    )
    if _SURROGATE.search(content):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it holds half of a surrogate pair (such as \\ud800), which is no text") from error
    return value


def _depth(structure: bytes) -> int:
    brackets = structure.translate(_DEPTHS, _OTHERS)
    return max(accumulate(array("b", brackets)), default=0)


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"it holds the number {text[:20]}, which is too large")
    return number


def _no_constant(text: str) -> float:
    raise ValueError(f"it holds {text}, which is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"'{twice}' appears twice")
    return found


#: Folder of one checkpoint, in the folder of all checkpoints of its run.
_STEP = re.compile(r"step-\d+")
_CHECKPOINTS, _MANIFEST, _JOB = "checkpoints", "manifest.json", "job.yaml"
_MODEL, _ADAPTER = "config.json", "adapter_config.json"
Kind = Literal["model", "adapter", "checkpoint", "checkpoints", "run", "file", "address", "nothing"]


@dataclass(frozen=True)
class Place:
    """Place that a command was given, maybe untrusted: a directory, a file or an address.

    Attributes:
        kind: ``model`` in Hugging Face layout; ``adapter``; one ``checkpoint``, or the folder of all ``checkpoints``
            of a run; ``run``; a ``file`` or an ``address``, whatever it holds; ``nothing`` of these.
        path: of the directory, file or address, as it was given.
        run: directory of the run that it belongs to, if it does.
    """

    kind: Kind
    path: Path
    run: Path | None = None

    @classmethod
    def of(cls, location: str | Path) -> Place:
        """Find out what a directory, file or address is, from the names in it alone.

        A ``config.json`` counts before all else, so that further files do not change how a model is read.
        """
        path = Path(location).expanduser()
        if "://" in str(location):
            return cls("address", Path(location))
        if path.is_file():
            return cls("file", path)
        if (path / _MODEL).is_file():
            return cls("model", path, _run_around(path, "model"))
        if (path / _ADAPTER).is_file():
            return cls("adapter", path, _run_around(path, "adapter"))
        if (path / _JOB).is_file() or (path / _CHECKPOINTS).is_dir():
            return cls("run", path, path)
        if _STEP.fullmatch(path.name) or (path / _MANIFEST).is_file():
            return cls("checkpoint", path, path.parent.parent if path.parent.name == _CHECKPOINTS else None)
        if any(path.glob(f"step-*/{_MANIFEST}")):
            return cls("checkpoints", path, path.parent if path.name == _CHECKPOINTS else None)
        return cls("nothing", path)

    @property
    def checkpoints(self) -> Path | None:
        """Folder of the training checkpoints, or the checkpoint itself; ``None`` if it holds none."""
        if self.kind in ("checkpoint", "checkpoints"):
            return self.path
        inside = self.path / _CHECKPOINTS
        return inside if self.kind == "run" and inside.is_dir() else None

    def of_the_model(self) -> Iterator[Path]:
        """Directories with the files that belong to the weights, such as the tokenizer's; the nearest first."""
        if self.kind == "file":
            yield self.path.parent
        elif self.kind != "address":
            yield self.path
        if self.run is not None:
            yield self.run / "model"
            yield self.run / "tokenizer"


def _run_around(path: Path, name: str) -> Path | None:
    """Run whose export a directory is."""
    return path.parent if path.name == name and (path.parent / _JOB).is_file() else None
