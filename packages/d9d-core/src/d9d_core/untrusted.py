"""Untrusted files and directories: detection of a directory's kind, and safe reading of its files.

A checkpoint, a model or a corpus may come from anywhere. Reading a file here takes bounded time and memory and returns
a value or raises an :class:`OSError` or :class:`ValueError` with a message for the user. :class:`Place` classifies the
path that a command receives, in the same way for all commands.
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

#: Largest size in bytes of a JSON file that is parsed; the index of a million tensors has a third of this size.
MAX_JSON_BYTES = 1 << 28
#: Largest depth of nested values, so that recursive functions stay within the interpreter's recursion limit.
MAX_JSON_DEPTH = 200
#: Largest number of values in a JSON file; a value takes about 60 bytes of memory, but may take only two in the file.
MAX_JSON_VALUES = 1 << 23
#: Largest number of digits of a whole number, so that a conversion to float does not overflow.
_MAX_DIGITS = 300

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}
# The closing quote is optional, and quantifiers are possessive, so that an unclosed string is scanned only once.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DEPTHS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS = bytes(set(range(256)) - set(b"[{]}"))


#: Characters that control a terminal, break or reorder a line: direction marks, separators of lines and paragraphs, and
#: all control characters except tab and newline.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

#: Symbolic links that a path may be: ``any``; ``near``, links within the file's directory or into the Hugging Face
#: cache; or ``none``.
Links = Literal["any", "near", "none"]


def visible(text: str) -> str:
    """Text for a terminal, with control characters escaped.

    Commands print text from untrusted files: names of tensors, labels, values of a job, a model's output.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def open_regular(path: str | Path, links: Links = "any") -> int:
    """Open an untrusted file for reading if it is a regular file, and return its descriptor. Never blocks.

    Args:
        path: path of the file.
        links: symbolic links that the path may be.

    Raises:
        OSError: the file cannot be opened, or is a device, a named pipe, a directory, or a link that is not allowed.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if links == "any" else os.O_NOFOLLOW)
    target = _target(path) if links == "near" else path
    try:
        descriptor = os.open(target, flags)
    except ValueError as error:  # a zero byte in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP and links != "any":
            raise OSError(
                errno.ELOOP, "the file is a symbolic link; put a copy of its target there", str(path)
            ) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        raise OSError(errno.EINVAL, f"the path leads to a {kind}; a regular file is needed", str(path))
    return descriptor


def _target(path: str | Path) -> str:
    """Path without symbolic links; an error if the link leaves its directory or the Hugging Face cache."""
    if not os.path.islink(path):  # noqa: PTH114 - for a path with a zero byte, both raise ValueError
        return str(path)
    directory, target = Path(os.path.realpath(Path(path).parent)), Path(os.path.realpath(path))
    # <cache>/models--x--y/snapshots/<revision>/config.json leads to ../../blobs/<hash>
    blobs = directory.parents[1] / "blobs" if directory.parent.name == "snapshots" else directory
    if directory not in target.parents and blobs not in target.parents:
        raise OSError(
            errno.ELOOP, "the file is a symbolic link to another directory; put a copy of its target there", str(path)
        )
    return str(target)


def read_regular(path: str | Path, limit: int = MAX_JSON_BYTES, links: Links = "any") -> bytes:
    """Contents of a regular file.

    Args:
        path: path of the file.
        limit: most bytes that the file may have.
        links: symbolic links that the path may be.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large.
    """
    with open(open_regular(path, links), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"the file has more than {limit:,} bytes, the limit for such files", str(path))
    return content


def parse_json(content: bytes, strict: bool = False, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse JSON of an untrusted file, in UTF-8, with or without a byte-order mark.

    Args:
        content: contents of the file.
        strict: whether to refuse duplicate names in an object, NaN and infinity, which some published models contain.
        limit: most bytes of content.

    Raises:
        ValueError: the content is not JSON, is too large or nested too deeply, has contents that ``strict`` refuses, or
            has text or numbers that later code cannot handle.
    """
    if len(content) > limit:
        raise ValueError(f"the JSON text has more than {limit:,} bytes")
    structure = _STRING.sub(b"", content)
    if _depth(structure) > MAX_JSON_DEPTH:
        raise ValueError(f"the JSON is nested more than {MAX_JSON_DEPTH} levels deep")
    if sum(map(structure.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"the JSON has more than {MAX_JSON_VALUES:,} values")
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
            raise ValueError("a text has half of a surrogate pair (such as \\ud800), which is invalid") from error
    return value


def _depth(structure: bytes) -> int:
    brackets = structure.translate(_DEPTHS, _OTHERS)
    return max(accumulate(array("b", brackets)), default=0)


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"the JSON has a number of {len(text)} digits, more than {_MAX_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _no_constant(text: str) -> float:
    raise ValueError(f"the JSON has {text}, which is not a JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name '{twice}' appears twice in a JSON object")
    return found


#: Name of a checkpoint's directory, within the directory of all checkpoints of its run.
_STEP = re.compile(r"step-\d+")
_CHECKPOINTS, _MANIFEST, _JOB = "checkpoints", "manifest.json", "job.yaml"
_MODEL, _ADAPTER = "config.json", "adapter_config.json"
Kind = Literal["model", "adapter", "checkpoint", "checkpoints", "run", "file", "address", "nothing"]


@dataclass(frozen=True)
class Place:
    """Possibly untrusted path that a command received, with its kind: a directory, a file or an address.

    Attributes:
        kind: ``model`` in Hugging Face layout; ``adapter``; a single ``checkpoint``, or the directory of all
            ``checkpoints`` of a run; ``run``; a ``file`` or an ``address``, whose contents are not examined;
            ``nothing`` of these.
        path: path of the directory, file or address, as given.
        run: directory of the run that contains the path; ``None`` if there is none.
    """

    kind: Kind
    path: Path
    run: Path | None = None

    @classmethod
    def of(cls, location: str | Path) -> Place:
        """Determine the kind of a directory, file or address by file names alone.

        A ``config.json`` takes precedence, so that further files do not change how a model is read.
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
        """Directory of the training checkpoints, or the checkpoint itself; ``None`` without checkpoints."""
        if self.kind in ("checkpoint", "checkpoints"):
            return self.path
        inside = self.path / _CHECKPOINTS
        return inside if self.kind == "run" and inside.is_dir() else None

    def of_the_model(self) -> Iterator[Path]:
        """Directories with files that belong to the weights, such as the tokenizer's, in the order of search."""
        if self.kind == "file":
            yield self.path.parent
        elif self.kind != "address":
            yield self.path
        if self.run is not None:
            yield self.run / "model"
            yield self.run / "tokenizer"


def _run_around(path: Path, name: str) -> Path | None:
    """Directory of the run that exported the model or adapter in ``path``; ``None`` if it is not an export."""
    return path.parent if path.name == name and (path.parent / _JOB).is_file() else None
