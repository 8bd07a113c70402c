"""Interfaces by which fine-tuning methods read and write adapter files of the ``peft`` library."""

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

#: Files of an adapter. Unlike a model's, its weights are always in one file.
ADAPTER_FILES = FileNames(config="adapter_config.json", stem="adapter_model")


@runtime_checkable
class AdapterFormat(Protocol):
    """Adapter file format of a fine-tuning method; an adapter is saved and loaded without the model."""

    @property
    def init_from(self) -> str | None:
        """Directory or fsspec address of an adapter to start from; ``None`` for a new adapter."""
        ...

    def adapter_config(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, Any]:
        """Contents of ``adapter_config.json``.

        Args:
            stage: the full model with the method injected.
            published: names of the model's tensors in published files, see :func:`published_names`.

        Raises:
            CheckpointError: the adapter format cannot represent the added tensors.
        """
        ...

    def adapter_exporter(self, stage: nn.Module, published: Mapping[str, str]) -> Mapper:
        """Mapper from the method's tensors to the adapter file's tensors; its inverse is used to load.

        The method's tensors are the added tensors and all parameters that the method trains.

        Raises:
            CheckpointError: the adapter format cannot represent the added tensors.
        """
        ...

    def check_adapter(
        self, stage: nn.Module, published: Mapping[str, str], config_json: Mapping[str, Any], names: Collection[str]
    ) -> None:
        """Check that an existing adapter fits this method's config.

        Args:
            stage: the full model with the method injected.
            published: names of the model's tensors in published files, see :func:`published_names`.
            config_json: contents of ``adapter_config.json``.
            names: names of the adapter's tensors.

        Raises:
            CheckpointError: the adapter is of another method, or this config would compute different results with it.
        """
        ...


@runtime_checkable
class MergesTensors(Protocol):
    """Fine-tuning method whose adapter a state graph can merge, from any checkpoint without the model in memory."""

    def merger(self, names: Collection[str]) -> Mapper:
        """Mapper from the tensors of a model with the method injected to the merged model's tensors.

        Args:
            names: names of the tensors; tensors that another method added are passed on.
        """
        ...


def published_names(exporter: Mapper, specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Names in published files by the names of a model's tensors, to be used in an adapter's files.

    The result has a tensor only if published files contain it unchanged, or if it is a tensor [experts, in, out] that
    is published as one matrix [out, in] per expert. The latter has the name of these matrices with ``*`` instead of the
    expert's number.

    Args:
        exporter: mapper from the model's tensors to the files' tensors.
        specs: specs of the model's tensors.
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
    """Pattern with ``*`` in place of the number, if names differ only in a number from 0 to ``count - 1``.

    ``None`` for other names.
    """
    parts = [name.split(".") for name in names]
    if len(names) != count or len({len(one) for one in parts}) != 1:
        return None
    numbers = [str(number) for number in range(count)]
    differing = [place for place, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if len(differing) != 1 or [one[differing[0]] for one in parts] != numbers:
        return None
    return ".".join("*" if place == differing[0] else part for place, part in enumerate(parts[0]))
