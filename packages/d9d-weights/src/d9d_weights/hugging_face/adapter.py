"""Format of adapters in the files of the ``peft`` library: what a fine-tuning method added to a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from d9d_core.types import TensorSpec
from torch import nn

from d9d_weights.graph.base import Mapper
from d9d_weights.graph.expressions import Source
from d9d_weights.graph.graph import StateGraph
from d9d_weights.hugging_face.layout import FileNames

__all__ = ["AdapterFormat", "MergesTensors"]

#: Files of an adapter; unlike a model's, its weights are always in one file.
ADAPTER_FILES = FileNames(config="adapter_config.json", stem="adapter_model")


@runtime_checkable
class AdapterFormat(Protocol):
    """Format of a fine-tuning method's own tensors; methods that have one are saved and loaded without the model."""

    @property
    def init_from(self) -> str | None:
        """Directory of an adapter to start from, or an fsspec address of one."""
        ...

    def adapter_config(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, Any]:
        """Contents of ``adapter_config.json``.

        Args:
            stage: the model with the method injected, all of it.
            published: see :func:`published_names`.

        Raises:
            CheckpointError: what the method added has no place in such files.
        """
        ...

    def adapter_exporter(self, stage: nn.Module, published: Mapping[str, str]) -> Mapper:
        """Mapper from the names of the method's tensors to those in the file; its inverse reads them.

        Raises:
            CheckpointError: as above.
        """
        ...

    def check_adapter(self, config_json: Mapping[str, Any], names: Collection[str]) -> None:
        """Compare this method with the ``adapter_config.json`` of an adapter to start from.

        Args:
            config_json: contents of the file.
            names: of the tensors beside it.

        Raises:
            CheckpointError: the adapter is of another kind, or would compute something else here.
        """
        ...


@runtime_checkable
class MergesTensors(Protocol):
    """Merging of a fine-tuning method as a state graph; methods that have one can be merged from any checkpoint."""

    def merger(self, names: Collection[str]) -> Mapper:
        """Mapper from the tensors of a model with the method injected to those of the model alone.

        Args:
            names: of the tensors; tensors that another method added pass.
        """
        ...


def published_names(exporter: Mapper, specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Names, for an adapter's files, that tensors of a model have in published files.

    They are those of tensors that are the same there; and those of banks [experts, in, out] that are a matrix [out, in]
    for each expert there, with ``*`` in place of its number.

    Args:
        exporter: from the model's names to those of the files.
        specs: the model's tensors.
    """
    graph = StateGraph(exporter, specs)
    found = {value.name: name for name, value in graph.outputs.items() if isinstance(value, Source)}
    pieces: dict[str, list[str]] = {}
    for name, value in graph.outputs.items():
        if not isinstance(value, Source) and len(sources := set(value.sources())) == 1:
            pieces.setdefault(sources.pop(), []).append(name)
    for source, names in pieces.items():
        shape = specs[source].shape
        are_matrices = len(shape) == 3 and all(graph.outputs[n].spec.shape == (shape[2], shape[1]) for n in names)
        if are_matrices and (pattern := _numbered(names, shape[0])):
            found[source] = pattern
    return found


def _numbered(names: Sequence[str], count: int) -> str | None:
    """Pattern of names that differ by one number, from 0 to ``count - 1`` in order, with ``*`` for it."""
    parts = [name.split(".") for name in names]
    if len(names) != count or len({len(one) for one in parts}) != 1:
        return None
    numbers = [str(number) for number in range(count)]
    differing = [place for place, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if len(differing) != 1 or [one[differing[0]] for one in parts] != numbers:
        return None
    return ".".join("*" if place == differing[0] else part for place, part in enumerate(parts[0]))
