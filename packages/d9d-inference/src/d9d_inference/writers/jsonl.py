"""Writer of JSON lines, ``jsonl``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from d9d_core.inference import Columns

from d9d_inference.config import JsonlWriterConfig


class JsonlWriter:
    """Writes one JSON object per row. NaN and infinity, which JSON lacks, become ``null``.

    Array elements are written with the fewest digits that parse to the same number in the array's dtype.

    Args:
        config: config of the writer; it has no settings.
    """

    def __init__(self, config: JsonlWriterConfig) -> None:
        self.config = config

    @property
    def suffix(self) -> str:
        """Suffix of the output files."""
        return ".jsonl"

    def write(self, path: Path, rows: Columns) -> None:
        """Write rows as a new file of JSON lines."""
        names = [json.dumps(name, ensure_ascii=False) for name in rows]
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for values in zip(*rows.values(), strict=True):
                fields = (f"{name}: {_text(value)}" for name, value in zip(names, values, strict=True))
                file.write(f"{{{', '.join(fields)}}}\n")

    def join(self, parts: Sequence[Path], path: Path) -> None:
        with path.open("xb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole, 1 << 20)


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _array_text(value)
    if isinstance(value, np.generic):
        return _array_text(value.reshape(1))[1:-1]
    return json.dumps(_without_nan(value), ensure_ascii=False)


def _array_text(array: np.ndarray[Any, Any]) -> str:
    if array.ndim > 1:
        return f"[{', '.join(map(_array_text, array))}]"
    if array.dtype.kind != "f":
        return json.dumps(array.tolist())
    words = array.astype(np.str_)
    if not np.isfinite(array).all():
        words = np.where(np.isfinite(array), words, "null")
    return f"[{', '.join(words.tolist())}]"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value
