"""Files of tensors in the safetensors format: a JSON header, then raw bytes.

The module does not use the ``safetensors`` library, because a checkpoint must be hashed while it is written, and read
by windows into existing tensors. The library can read files of this module, and this module files of the library.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_core.untrusted import parse_json
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Dtypes that a file can hold -> their names in the format.
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_ALIGNMENT = 8
# Limit of the safetensors library: a longer header is an attack or has a damaged length.
_MAX_HEADER = 100_000_000
_MAX_DIMS = 64
_LARGEST = 2**63 - 1
#: Bytes written and hashed at once: small enough for the cache, large enough to hide interpreter overhead.
_CHUNK = 1 << 22
#: Rows up to this many bytes are read in full and cut in memory, instead of one read per part of a row.
_SMALL_ROW = 1 << 18


@dataclass(frozen=True, slots=True)
class Written:
    """Size and checksum of a written file.

    Attributes:
        bytes: size.
        sha256: checksum, hexadecimal.
    """

    bytes: int
    sha256: str


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], tell: Callable[[int, int], None] = lambda _done, _total: None
) -> Written:
    """Write a safetensors file from its beginning, and hash it in the same pass.

    Args:
        file: file that is written sequentially.
        tensors: tensors of any shape, strides and device; device tensors are copied to host memory one at a time.
        tell: called with the bytes written so far, and with the size of the file.

    Raises:
        CheckpointError: the format does not support a dtype, or reserves a name.
    """
    # Widest dtype first, so that every entry is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    digest, size = hashlib.sha256(), 0
    layout = plan_layout({name: TensorSpec(tuple(tensors[name].shape), tensors[name].dtype) for name in names})
    for content in itertools.chain([memoryview(layout.header)], (_bytes_of(tensors[name]) for name in names)):
        for start in range(0, len(content), _CHUNK):
            chunk = content[start : start + _CHUNK]
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
            tell(size, layout.bytes)
    return Written(size, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of all tensors in a file.

    Attributes:
        header: first bytes of the file.
        starts: position of each tensor's first byte, by name.
        bytes: size of the file.
    """

    header: bytes
    starts: Mapping[str, int]
    bytes: int


def plan_layout(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> Layout:
    """Lay tensors out in a safetensors file one after the other, in the order given.

    Args:
        specs: specs of the tensors, widest dtype first, so that every entry is aligned.
        metadata: further text entries of the header.

    Raises:
        CheckpointError: the format does not support a dtype, or reserves a name.
    """
    entries: dict[str, Any] = {}
    starts: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        if spec.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"tensor '{name}' is {spec.dtype}, which safetensors does not support; convert it, for example to "
                "float32"
            )
        if name == _METADATA:
            raise CheckpointError(
                f"safetensors reserves the name '{name}', so a tensor cannot have it; rename the tensor"
            )
        start, end = end, end + math.prod(spec.shape) * spec.dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        starts[name] = start
    if metadata:
        entries = {_METADATA: dict(metadata), **entries}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memory_of(tensor.detach().cpu().contiguous())


def memory_of(tensor: Tensor) -> memoryview:
    """Memory of a contiguous host tensor as bytes, not copied."""
    # A contiguous tensor of one element may have any stride, for which view() fails.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def is_possible(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a tensor of this shape can exist in torch, which limits the number of dimensions and of bytes."""
    # Strides of an empty tensor are computed as if its dimensions were at least 1.
    return len(shape) <= _MAX_DIMS and math.prod(max(n, 1) for n in shape) * dtype.itemsize <= _LARGEST


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a tensor in a file.

    Attributes:
        dtype: dtype of the tensor.
        shape: size of each dimension.
        start: position of its first byte in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def has_window(self, offset: Sequence[int], shape: Sequence[int]) -> bool:
        """Whether a window of ``shape`` at ``offset`` lies inside the tensor."""
        return len(offset) == len(shape) == len(self.shape) and all(
            0 <= first <= size - length for first, length, size in zip(offset, shape, self.shape, strict=True)
        )


@runtime_checkable
class Source(Protocol):
    """Source of bytes that can be read at any position; thread-safe if its ``read_into`` is thread-safe."""

    def size(self) -> int:
        """Size of the file in bytes."""
        ...

    def read_into(self, start: int, view: memoryview) -> int:
        """Fill the beginning of ``view`` with bytes from position ``start``; returns their number, 0 at the end."""
        ...


class _Seeking:
    """Source that seeks and reads in a file object, for one thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def size(self) -> int:
        return self._file.seek(0, 2)

    def read_into(self, start: int, view: memoryview) -> int:
        self._file.seek(start)
        return int(self._file.readinto(view))  # type: ignore[attr-defined] # every binary file has it


class TensorFile:
    """Safetensors file that is read by windows; thread-safe if its source is thread-safe.

    Args:
        file: seekable file, or a source.
        name: name of the file in errors.

    Raises:
        CheckpointError: the header is damaged, or does not match the file.
    """

    def __init__(self, file: BinaryIO | Source, name: str) -> None:
        self._source: Source = file if isinstance(file, Source) else _Seeking(file)
        self._name = name
        try:
            self.entries = self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header is unreadable ({type(error).__name__}: {error})") from error

    def read(self, key: str, offset: Sequence[int], into: Tensor) -> None:
        """Fill a tensor with the window of an entry that begins at ``offset``. Reads no rows outside the window.

        Args:
            key: name of the entry.
            offset: first index in each dimension.
            into: tensor with the window's shape and the entry's dtype; any strides and device.

        Raises:
            CheckpointError: the entry or window does not exist, or the file ends early.
        """
        entry = self.entries.get(key)
        if entry is None:
            raise self._damaged(f"the file has no tensor '{key}'")
        if not entry.has_window(offset, into.shape) or entry.dtype != into.dtype:
            raise self._damaged(
                f"tensor '{key}' is {entry.dtype} {list(entry.shape)}, which does not contain the expected window "
                f"{into.dtype} {list(into.shape)} at {list(offset)}"
            )
        if not into.numel():
            return
        direct = into.device.type == "cpu" and into.is_contiguous()
        target = into.detach() if direct else torch.empty(into.shape, dtype=into.dtype)
        self._fill(target, entry.shape, offset, entry.start)
        if not direct:
            into.detach().copy_(target)

    def _fill(self, target: Tensor, shape: Sequence[int], offset: Sequence[int], start: int) -> None:
        """Fill ``target`` with the window at ``offset`` of an array of ``shape`` whose bytes begin at ``start``."""
        if not shape:
            self._read_bytes(start, target)
            return
        row = math.prod(shape[1:])
        start += offset[0] * row * target.itemsize
        if target.shape[1:] == tuple(shape[1:]):
            self._read_bytes(start, target)
        elif row * target.itemsize > _SMALL_ROW:
            for index, part in enumerate(target):
                self._fill(part, shape[1:], offset[1:], start + index * row * target.itemsize)
        else:
            rows = max(1, _CHUNK // (row * target.itemsize))
            window = tuple(slice(first, first + n) for first, n in zip(offset[1:], target.shape[1:], strict=True))
            for first in range(0, len(target), rows):
                part = target[first : first + rows]
                rows_read = torch.empty((len(part), *shape[1:]), dtype=target.dtype)
                self._read_bytes(start + first * row * target.itemsize, rows_read)
                part.copy_(rows_read[(slice(None), *window)])

    def _read_bytes(self, start: int, target: Tensor) -> None:
        self._read_whole(start, memory_of(target))

    def _read_whole(self, start: int, view: memoryview) -> None:
        while view:
            count = self._source.read_into(start, view)
            if not count:
                raise self._damaged("the file ends early")
            start, view = start + count, view[count:]

    def _read_header(self) -> dict[str, Entry]:
        size = self._source.size()
        prefix = bytearray(min(size, _LENGTH_BYTES))
        self._read_whole(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER):
            raise self._damaged(f"the file has {size} bytes, but its first bytes give a header of {length} bytes")
        text = bytearray(length)
        self._read_whole(_LENGTH_BYTES, memoryview(text))
        header = parse_json(bytes(text), strict=True)
        header.pop(_METADATA, None)
        begin = _LENGTH_BYTES + length
        entries, spans = {}, []
        for name, facts in header.items():
            if facts["dtype"] not in _DTYPES:
                raise ValueError(f"tensor '{name}' has the dtype {facts['dtype']}, which torch does not support")
            dtype, shape, (start, end) = _DTYPES[facts["dtype"]], tuple(facts["shape"]), facts["data_offsets"]
            if not all(type(n) is int and 0 <= n <= _LARGEST for n in (*shape, start, end)):
                raise ValueError(f"tensor '{name}' has a size or an offset that is not a whole number from 0 up")
            if not is_possible(shape, dtype):
                raise ValueError(f"tensor '{name}' has a shape that no tensor can have")
            if end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(
                    f"tensor '{name}' has {end - start} bytes, too many or too few for {facts['dtype']} {list(shape)}"
                )
            entries[name] = Entry(dtype, shape, begin + start)
            spans.append((start, end, name))
        self._check_spans(sorted(spans), size - begin)
        return entries

    def _check_spans(self, spans: list[tuple[int, int, str]], size: int) -> None:
        expected = 0
        for start, end, name in spans:
            if start != expected:
                what = (
                    "overlaps the tensor before it" if start < expected else "leaves a gap after the tensor before it"
                )
                raise self._damaged(f"tensor '{name}' {what}")
            expected = end
        if expected != size:
            raise self._damaged(f"its tensors need {expected} bytes after the header, but {size} follow it")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._name} is damaged: {why}")
