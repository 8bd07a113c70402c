"""Schema of a manifest, checked before any value of an untrusted manifest is used."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import torch
from d9d_core.errors import CheckpointError
from d9d_core.optimizer import AveragesWeights, Optimizer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from d9d_weights.files.safetensors import DTYPE_NAMES, is_possible

FORMAT = "d9d-checkpoint"
#: Version of the manifest's format. Version 1, with full tensors in one file, was never released.
VERSION = 2
#: File of all values that are not tensors.
VALUES = "state.json"
_LARGEST = 2**63 - 1
_SHOWN = 3

Natural = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
Shape = tuple[Natural, ...]
#: File names cannot lead out of the checkpoint's directory.
TensorsFile = Annotated[str, Field(pattern=r"^tensors-[0-9]{5,9}\.safetensors$")]
File = Annotated[str, Field(pattern=rf"^({re.escape(VALUES)}|tensors-[0-9]{{5,9}}\.safetensors)$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileFacts(_Part):
    """Size and checksum of a file of the checkpoint."""

    bytes: Natural
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Piece(_Part):
    """Window (offset and shape) of a tensor, and the file and key that store its values."""

    file: TensorsFile
    key: str
    offset: Shape
    shape: Shape


class Entry(_Part):
    """Manifest entry of one tensor: dtype, shape, and pieces that cover each element once."""

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @model_validator(mode="after")
    def _pieces_make_the_tensor(self) -> Self:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
            raise ValueError(f"the tensor has the dtype {self.dtype[:40]!r}, which checkpoints do not support")
        numbers = math.prod(self.shape)
        if not is_possible(self.shape, dtype):
            raise ValueError(f"no tensor can have the shape {str(list(self.shape))[:80]}")
        for piece in self.pieces:
            if not len(piece.offset) == len(piece.shape) == len(self.shape):
                raise ValueError(f"a piece of the tensor does not have {len(self.shape)} dimensions, as the tensor has")
            if any(o + n > size for o, n, size in zip(piece.offset, piece.shape, self.shape, strict=True)):
                raise ValueError(
                    f"the piece {list(piece.shape)} at {list(piece.offset)} exceeds the tensor {list(self.shape)}"
                )
        if sum(math.prod(piece.shape) for piece in self.pieces) != numbers or not self.pieces:
            raise ValueError("the tensor's pieces together do not have as many elements as the tensor")
        if _overlap(self.pieces):
            raise ValueError("pieces of the tensor overlap")
        return self


class Plugin(_Part):
    """Plugin that was loaded when the checkpoint was saved."""

    version: str
    editable: bool
    sha256: str


class Score(_Part):
    """Name and value of the series that decides which checkpoints are the best ones to keep."""

    series: str
    value: Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Average(_Part):
    """Rule of evaluation weights: each is ``lerp(parameter, its optimizer state called slot, weight)``."""

    slot: str
    weight: Annotated[float, Field(strict=True, allow_inf_nan=False)]


class ManifestModel(_Part):
    """Pydantic model of the contents of ``manifest.json``, whose checksum the reader verifies first."""

    format: Literal["d9d-checkpoint"]
    version: Literal[2]
    step: Natural
    tensors: dict[str, Entry]
    files: dict[File, FileFacts]
    sha256: str
    job: dict[str, Any] | None = None
    plugins: dict[str, Plugin] | None = None
    left_out: tuple[str, ...] = ()
    score: Score | None = None
    average: Average | None = None

    @model_validator(mode="after")
    def _pieces_are_where_they_are_written(self) -> Self:
        if VALUES not in self.files:
            raise ValueError(f"files: {VALUES} is not listed")
        for name, entry in self.tensors.items():
            for piece in entry.pieces:
                if piece.file not in self.files:
                    raise ValueError(f"tensors.{name}: {piece.file} is not listed under files")
                if piece.key != piece_key(name, piece.offset, piece.shape == entry.shape):
                    raise ValueError(f"tensors.{name}: a piece has the wrong key {piece.key!r}")
        return self


def piece_key(name: str, offset: Sequence[int], is_whole: bool) -> str:
    """Key of a piece in its file: the tensor's name if the piece is the full tensor, else the name and the offset."""
    return name if is_whole else f"{name}@{','.join(map(str, offset))}"


def check_form(manifest: Any, where: str) -> None:
    """Check a manifest against its schema.

    Args:
        manifest: parsed contents of the file.
        where: name of the file in errors.

    Raises:
        CheckpointError: a value does not fit the schema.
    """
    try:
        ManifestModel.model_validate(manifest)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, line['loc'])) or 'manifest'}: {line['msg'].removeprefix('Value error, ')}"
            for line in error.errors(include_url=False, include_input=False, include_context=False)
        ]
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        text = "; ".join(problem[:300] for problem in problems[:_SHOWN]) + more
        raise CheckpointError(f"{where} is not valid: {text}; copy the checkpoint again") from None


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether two windows overlap. Sorted windows are mostly disjoint, so few pairs are compared."""
    windows = sorted((p.offset, p.shape) for p in pieces if all(p.shape))
    if len(windows) < 2:
        return False
    if not windows[0][0]:
        return True  # windows of a 0-d tensor always overlap
    open_ends: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for offset, shape in windows:
        del open_ends[: bisect.bisect_right(open_ends, offset[0], key=lambda item: item[0])]
        if any(_meet(offset, shape, other, size) for _, other, size in open_ends):
            return True
        bisect.insort(open_ends, (offset[0] + shape[0], offset, shape))
    return False


def _meet(offset: Sequence[int], shape: Sequence[int], other: Sequence[int], size: Sequence[int]) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(offset, shape, other, size, strict=True))


def average_of(optimizer: Optimizer) -> dict[str, Any]:
    """Manifest entry by which readers compute evaluation weights; empty if they use the saved weights."""
    if not isinstance(optimizer, AveragesWeights):
        return {}
    slot, weight = optimizer.average
    return {"average": {"slot": slot, "weight": weight}}
