"""Model directories in Hugging Face layout, read by windows directly into their target tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from torch import Tensor

from d9d_weights.files.directory import Directory
from d9d_weights.files.open import open_directory
from d9d_weights.files.safetensors import TensorFile
from d9d_weights.hugging_face.blocks import BlockBuffer
from d9d_weights.hugging_face.index import check_index, read_object, weight_map
from d9d_weights.hugging_face.layout import (
    CONFIG,
    SAFETENSORS,
    find_index,
    find_weights,
    is_plain_name,
    passed_through,
    refuse_pickles,
)

__all__ = ["ModelDirectory"]

#: First bytes of the pointer that Git LFS leaves for a file that was not downloaded, and its largest size in bytes.
_LFS = b"version https://git-lfs"
_LFS_BYTES = 1024


class ModelDirectory:
    """Directory of a model in Hugging Face layout: config.json and safetensors files. Create it with :meth:`open`.

    Args:
        directory: directory of the files.
        files: weight files in order, by file name.
        resources: stack that is closed with the directory.
        on_bytes: called after each read from a file, with its number of bytes, in the reading thread.

    Raises:
        CheckpointError: two files contain a tensor of the same name.
    """

    def __init__(
        self,
        directory: Directory,
        files: Mapping[str, TensorFile],
        resources: ExitStack,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self._directory = directory
        self._resources = resources
        self._on_bytes = on_bytes
        self._buffer = BlockBuffer()
        self._closed = False
        self._held: dict[str, str] = {}
        self._files = files
        specs: dict[str, TensorSpec] = {}
        for file, opened in files.items():
            for name, entry in sorted(opened.entries.items(), key=lambda item: (item[1].start, item[0])):
                if name in specs:
                    raise CheckpointError(
                        f"{directory} contains '{name}' twice, in {self._held[name]} and in {file}: "
                        "remove the file that does not belong to the model, or name one file instead of the directory"
                    )
                specs[name] = TensorSpec(entry.shape, entry.dtype)
                self._held[name] = file
        #: Tensor name -> shape and dtype, in the order of the files.
        self.specs: Mapping[str, TensorSpec] = MappingProxyType(specs)

    @classmethod
    def open(cls, location: str | Path, on_bytes: Callable[[int], None] | None = None, *, weights: bool = True) -> Self:
        """Open a model and check headers, index and names; no tensor is read.

        Args:
            location: a directory, or one ``.safetensors`` file; a local path or an fsspec address.
            on_bytes: called after each read from a file, with its number of bytes, in the reading thread.
            weights: whether to open the weight files; without them the directory has no tensors.

        Raises:
            CheckpointError: the location is not a model, is damaged, or has its weights in pickle files.
        """
        directory, file = _split(location)
        resources = ExitStack()
        if not weights:
            return cls(directory, {}, resources, on_bytes)
        try:
            if file is not None:
                return cls(directory, {file: _opened(directory, file, resources)}, resources, on_bytes)
            names = directory.names()
            index = find_index(str(directory), names)
            if index is None:
                shards, table = find_weights(str(directory), names), None
            else:
                table = weight_map(f"{directory}/{index}", directory.read(index), names)
                shards = sorted(set(table.values()))
            opened = cls(
                directory, {shard: _opened(directory, shard, resources) for shard in shards}, resources, on_bytes
            )
            if table is not None:
                check_index(f"{directory}/{index}", table, opened._held)
        except BaseException:
            resources.close()
            raise
        return opened

    @property
    def location(self) -> str:
        """Path or address of the model."""
        return str(self._directory)

    def config(self) -> dict[str, Any]:
        """Contents of ``config.json``.

        Raises:
            CheckpointError: the file is absent, or not a JSON object.
        """
        return read_object(f"{self._directory}/{CONFIG}", self.read_file(CONFIG))

    def other_files(self) -> list[str]:
        """Names of the files that a conversion copies unchanged: tokenizer, chat template, generation config."""
        return passed_through(self._directory.names())

    def read_file(self, name: str) -> bytes:
        """Read a file at the top of the directory.

        Raises:
            CheckpointError: the name is not a plain file name, or the file cannot be read.
        """
        if not is_plain_name(name):
            raise CheckpointError(
                f"'{name}' is not a file directly in {self._directory}; give a file name without directories"
            )
        return self._directory.read(name)

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        """Fill a tensor with a window of one of the model's tensors. Several threads may read at once.

        Only the window's rows are read. In addition to ``into``, a thread uses a buffer of fixed size.

        Args:
            name: name of the model's tensor.
            offset: first index of the window in each dimension.
            into: tensor with the window's shape; any strides, device, and dtype that the values can be cast to.

        Raises:
            CheckpointError: the tensor or window does not exist, or the file cannot be read.
        """
        spec = self.specs.get(name)
        if spec is None or self._closed:
            raise CheckpointError(
                f"{self._directory} {'was closed' if self._closed else f'has no tensor {name!r}; see specs'}"
            )
        file = self._files[self._held[name]]
        if not file.entries[name].has_window(offset, into.shape):
            raise CheckpointError(
                f"'{name}' of {self._directory} has the shape {list(spec.shape)}, which does not contain the "
                f"window {list(into.shape)} at {list(offset)}; use the sizes of the directory's config.json"
            )
        if not torch.can_cast(spec.dtype, into.dtype):
            raise CheckpointError(
                f"'{name}' of {self._directory} is {spec.dtype}, which cannot be cast to {into.dtype}; read it into a "
                f"tensor of {spec.dtype}"
            )
        for start, part in self._buffer.views(into.detach(), spec.dtype.itemsize):
            at = [first + more for first, more in zip(offset, start, strict=True)]
            if part.device.type == "cpu" and part.dtype == spec.dtype and part.is_contiguous():
                file.read(name, at, part)
            else:
                block = self._buffer.take(part, spec.dtype)
                file.read(name, at, block)
                part.copy_(block.to(part.device))  # moved before the cast, because a GPU casts faster
            if self._on_bytes is not None:
                self._on_bytes(part.numel() * spec.dtype.itemsize)

    def close(self) -> None:
        """Close the files. No thread may be reading."""
        self._closed = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _split(location: str | Path) -> tuple[Directory, str | None]:
    """Directory of a location, and the file name if the location is a file."""
    remote = isinstance(location, str) and "://" in location
    text = str(location).rstrip("/")
    is_file = text.endswith(SAFETENSORS) if remote else Path(location).is_file()
    if not is_file:
        return open_directory(location), None
    refuse_pickles(text, [text])
    if not text.endswith(SAFETENSORS):
        raise CheckpointError(f"{text} is not a {SAFETENSORS} file: name one, or the directory of a model")
    parent, _, file = text.rpartition("/")
    return open_directory(parent if remote else Path(location).parent), file


def _opened(directory: Directory, name: str, resources: ExitStack) -> TensorFile:
    source = directory.open(name)
    resources.callback(source.close)
    start = bytearray(len(_LFS))
    if source.size() < _LFS_BYTES and start[: source.read_into(0, memoryview(start))] == _LFS:
        raise CheckpointError(
            f"{directory}/{name} is a pointer of Git LFS, not the file itself: run 'git lfs pull' there"
        )
    try:
        return TensorFile(source, f"{directory}/{name}")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; copy or download it again") from error
