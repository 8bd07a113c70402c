"""Merging of a fine-tuning method into the model for an export, with exact restoration afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from d9d_core.peft import PeftMethod
from d9d_core.tensors import local
from d9d_core.trees import leaves
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def merged(peft: PeftMethod | None, model: nn.Module) -> Iterator[None]:
    """Merge a fine-tuning method into the model inside the block, and restore the model afterwards, bit for bit.

    Before merging writes into a tensor, this rank's shard of the tensor is copied to host memory.

    Args:
        peft: fine-tuning method; ``None`` if the job has none.
        model: all stages; stages of other ranks may be on the meta device.
    """
    if peft is None:
        yield
        return
    objects = [_Attributes(one) for one in (peft, *model.modules())]
    tensors = [_Properties(tensor) for tensor in (*model.parameters(), *model.buffers())]
    originals = _Originals([one.shard for one in tensors])
    try:
        with originals:
            peft.merge(model)
        yield
    finally:
        for attributes in objects:
            attributes.restore()
        for properties in tensors:
            properties.restore()
        originals.restore()


class _Attributes:
    """Class and attributes of an object, including the contents of containers, for restoration."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._class = type(owner)
        self._values = dict(vars(owner)) if hasattr(owner, "__dict__") else {}
        # A module keeps parameters, buffers, submodules and hooks in dictionaries.
        self._contents = {name: value.copy() for name, value in self._values.items() if _is_container(value)}

    def restore(self) -> None:
        if type(self._owner) is not self._class:
            self._owner.__class__ = self._class
        if not self._values:
            return
        now = vars(self._owner)
        now.clear()
        now.update(self._values)
        for name, content in self._contents.items():
            container = self._values[name]
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list | set)


class _Properties:
    """Storage and ``requires_grad`` of a tensor, for restoration."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._data = tensor.data
        self._requires_grad = tensor.requires_grad
        self.shard = local(tensor).detach()

    def restore(self) -> None:
        if self._tensor.requires_grad != self._requires_grad:
            self._tensor.requires_grad_(self._requires_grad)
        if _memory_of(local(self._tensor)) != _memory_of(self.shard) or self._tensor.shape != self._data.shape:
            self._tensor.data = self._data


class _Originals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that copies a tensor to host memory before an operator writes into it.

    Args:
        shards: this rank's shards of the tensors to restore.
    """

    def __init__(self, shards: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shards: dict[int, list[Tensor]] = {}
        for shard in shards:
            if memory := _memory_of(shard):
                self._shards.setdefault(memory, []).append(shard)
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - torch has no public schema
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in leaves(written):
                    self._keep(tensor)
        return func(*args, **kwargs)

    def restore(self) -> None:
        with torch.no_grad():
            for shard, copy in self._copies:
                shard.copy_(copy)

    def _keep(self, written: object) -> None:
        if isinstance(written, Tensor):
            for shard in self._shards.pop(_memory_of(local(written)), ()):
                self._copies.append((shard, shard.to("cpu", copy=True)))


def _memory_of(tensor: Tensor) -> int:
    """Address of a tensor's storage; 0 on the meta device."""
    return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()
