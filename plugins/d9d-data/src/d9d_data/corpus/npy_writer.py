"""Writer that appends to a one-dimensional ``.npy`` file, so that a corpus need not fit into memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt


class NpyWriter:
    """Writer that appends to an ``.npy`` file; the file is valid after the context manager exits without an error."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._path = path
        self.length = 0

    def __enter__(self) -> Self:
        self._file: BinaryIO = self._path.open("wb")
        self._header_size = self._write_header()
        return self

    def append(self, values: npt.NDArray[Any]) -> None:
        """Append values; they must fit into the array's dtype."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).tobytes())
        self.length += len(values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.seek(0)
                # numpy pads headers so that a growing first dimension does not move the data.
                if self._write_header() != self._header_size:
                    raise RuntimeError(f"the header of {self._path} no longer fits the space reserved for it")
        finally:
            self._file.close()

    def _write_header(self) -> int:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()
