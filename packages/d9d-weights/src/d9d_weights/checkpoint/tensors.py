"""Tensors of a training checkpoint, which one process reads without a job and without memory for the whole model."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_core.untrusted import Place
from torch import Tensor

from d9d_weights.checkpoint.manifest import read_manifest, read_state
from d9d_weights.checkpoint.names import folder, steps_in
from d9d_weights.files.directory import MANIFEST, DirectoryStore
from d9d_weights.files.open import open_directory, open_store
from d9d_weights.files.safetensors import TensorFile
from d9d_weights.hugging_face.layout import CONFIG

_MODEL = "model/"
_FOLDER = re.compile(r"step-\d+")


class CheckpointTensors:
    """Tensors of one checkpoint, of which any window (block of elements) can be read.

    Args:
        location: a checkpoint's directory, a directory of checkpoints, or a run's directory; of several checkpoints,
            the newest complete one is read.
        scope: prefix of the names of the tensors to read; it is removed from their names. With ``model/``, :meth:`read`
            returns evaluation weights (such as averages) if the checkpoint has them.

    Attributes:
        specs: shape and dtype of each tensor, by name.
        manifest: contents of ``manifest.json``.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """

    def __init__(self, location: str | Path, scope: str = "") -> None:
        text = str(location).rstrip("/")
        parent, _, name = text.rpartition("/")
        if not _is_folder(text):
            parent = _checkpoints_below(text)
            storage = open_store(parent)
            name = _newest(storage)
        self._storage, self._name = open_store(parent or "."), name
        self.location = self._storage.location(name)
        self.manifest: dict[str, Any] = read_manifest(self._storage, name)
        table: Mapping[str, Any] = self.manifest["tensors"]
        self._everything = table
        # Readers of the model get its evaluation weights (such as averages), if these differ from the trained ones.
        self._average = self.manifest.get("average") if scope == _MODEL else None
        self._table = {key.removeprefix(scope): entry for key, entry in table.items() if key.startswith(scope)}
        self.specs = {
            key: TensorSpec(tuple(entry["shape"]), getattr(torch, entry["dtype"])) for key, entry in self._table.items()
        }
        self._opened = ExitStack()
        self._files: dict[str, TensorFile] = {}
        self._lock = threading.Lock()

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        """Fill ``into`` with the window at ``offset`` of the shape of ``into``, converted to the dtype of ``into``.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        slot = None if self._average is None else self._everything.get(f"optimizer/{name}/{self._average['slot']}")
        if slot is None or self._average is None:
            self._fill(self._table[name], offset, into)
            return
        own, other = (torch.empty(into.shape, dtype=getattr(torch, e["dtype"])) for e in (self._table[name], slot))
        self._fill(self._table[name], offset, own)
        self._fill(slot, offset, other)
        into.copy_(torch.lerp(own.to(other.dtype), other, self._average["weight"]).to(own.dtype))

    def _fill(self, entry: Mapping[str, Any], offset: Sequence[int], into: Tensor) -> None:
        for piece in entry["pieces"]:
            begin, end = piece["offset"], [o + n for o, n in zip(piece["offset"], piece["shape"], strict=True)]
            first = [max(o, b) for o, b in zip(offset, begin, strict=True)]
            last = [min(o + n, e) for o, n, e in zip(offset, into.shape, end, strict=True)]
            if any(a >= z for a, z in zip(first, last, strict=True)):
                continue
            part = into
            for dim, (a, z, o) in enumerate(zip(first, last, offset, strict=True)):
                part = part.narrow(dim, a - o, z - a)
            inside = [a - b for a, b in zip(first, begin, strict=True)]
            dtype = getattr(torch, entry["dtype"])
            here = part if part.dtype == dtype else torch.empty(part.shape, dtype=dtype)
            try:
                with self._lock:  # a file has one position, so one thread reads at a time
                    self._file(piece["file"]).read(piece["key"], inside, here)
            except OSError as error:
                raise CheckpointError(f"{self.location}/{piece['file']} cannot be read: {error}") from error
            if here is not part:
                part.copy_(here)

    def values(self) -> dict[str, Any]:
        """Values of the checkpoint that are not tensors.

        Raises:
            CheckpointError: the values cannot be read.
        """
        return read_state(self._storage, self._name)

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            try:
                opened = self._opened.enter_context(self._storage.open(self._name, name))
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"checkpoint {self.location} lacks the file {name}; copy the checkpoint again"
                ) from error
            self._files[name] = TensorFile(opened, f"{self.location}/{name}")
        return self._files[name]


def is_checkpoint(location: str) -> bool:
    """Whether a location has training checkpoints rather than a model in Hugging Face layout."""
    text = location.rstrip("/")
    if "://" in text:
        return _is_folder(text) or bool(_steps(open_store(text)))
    return Place.of(text).checkpoints is not None


def _is_folder(location: str) -> bool:
    """Whether a location is a single checkpoint; a directory of a run or model may also be called ``step-100``."""
    if _FOLDER.fullmatch(location.rpartition("/")[2]) is None:
        return False
    if "://" not in location:
        return Place.of(location).kind == "checkpoint"
    try:
        return CONFIG not in open_directory(location).names()
    except CheckpointError:  # no such directory: the error comes when it is opened
        return True


def _newest(storage: DirectoryStore) -> str:
    """Name of the newest complete checkpoint. At an fsspec address, a directory may exist before its manifest does."""
    for step in _steps(storage):
        try:
            with storage.open(folder(step), MANIFEST):
                pass
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{storage.location(folder(step))} cannot be read: {error}") from error
        # otherwise the directory is a copy of another step's checkpoint
        if read_manifest(storage, folder(step))["step"] == step:
            return folder(step)
    raise CheckpointError(f"{storage} has no complete checkpoint; give the directory of a run that has saved one")


def _steps(storage: DirectoryStore) -> list[int]:
    try:
        return steps_in(storage)
    except OSError as error:
        raise CheckpointError(f"{storage} cannot be read: {error}; check the address and your permissions") from error


def _checkpoints_below(location: str) -> str:
    inside = Path(location, "checkpoints")
    return str(inside) if "://" not in location and inside.is_dir() else location
