"""Writer of one weight file, with each tensor at its planned offset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import BinaryIO

from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from torch import Tensor

from d9d_weights.files.safetensors import Layout, memory_of
from d9d_weights.hugging_face.blocks import BlockBuffer
from d9d_weights.hugging_face.layout import some


class ShardWriter:
    """Writer of one weight file, whose tensors may come in any order. For one thread.

    Args:
        file: empty, seekable file.
        name: name of the file in errors.
        specs: specs of the file's tensors.
        layout: positions of the tensors.
        buffer: buffer for tensors that are not contiguous in host memory.
        on_bytes: called after each write, with its number of bytes.
    """

    def __init__(
        self,
        file: BinaryIO,
        name: str,
        specs: Mapping[str, TensorSpec],
        layout: Layout,
        buffer: BlockBuffer,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self._file = file
        self._name = name
        self._specs = specs
        self._layout = layout
        self._buffer = buffer
        self._on_bytes = on_bytes
        self._missing = dict.fromkeys(specs)  # an ordered set
        file.write(layout.header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor at once; after the return, the caller may overwrite its memory.

        Args:
            name: name of one of the file's tensors.
            tensor: tensor of the planned shape and dtype; any strides and device.

        Raises:
            CheckpointError: the tensor does not belong to this file, differs from its spec, or was written before.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(
                f"tensor '{name}' does not belong to the file {self._name}; write it to the file that file_of() returns"
            )
        if name not in self._missing:
            raise CheckpointError(f"tensor '{name}' was already written to {self._name}; write each tensor once")
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise CheckpointError(
                f"tensor '{name}' of {self._name} is {tensor.dtype} {list(tensor.shape)}, but specs declared "
                f"{spec.dtype} {list(spec.shape)}; write it in this form"
            )
        self._file.seek(self._layout.starts[name])
        for _, part in self._buffer.views(tensor.detach(), spec.dtype.itemsize):
            if part.device.type != "cpu" or not part.is_contiguous():
                block = self._buffer.take(part, spec.dtype)
                block.copy_(part)
            else:
                block = part
            self._file.write(memory_of(block))
            if self._on_bytes is not None:
                self._on_bytes(block.nbytes)
        del self._missing[name]

    def check_complete(self) -> None:
        """Check that all tensors were written.

        Raises:
            CheckpointError: tensors are missing.
        """
        if self._missing:
            raise CheckpointError(f"{self._name} is not complete: write {some(list(self._missing))} before closing it")
