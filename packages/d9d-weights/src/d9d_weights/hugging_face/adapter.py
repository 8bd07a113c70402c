"""Format of adapters in the files of the ``peft`` library: what a fine-tuning method added to a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from d9d_core.types import TensorSpec
from torch import nn

from d9d_weights.graph.base import Mapper
from d9d_weights.graph.expressions import Source
from d9d_weights.graph.graph import StateGraph
from d9d_weights.hugging_face.layout import FileNames

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
            published: parameters of the model that published files hold as they are -> their names there.

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

    def check_adapter(self, config_json: Mapping[str, Any]) -> None:
        """Compare this method with the ``adapter_config.json`` of an adapter to start from.

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
    """Names that tensors of a model have in published files, of those that are the same tensor there.

    Args:
        exporter: from the model's names to those of the files.
        specs: the model's tensors.
    """
    graph = StateGraph(exporter, specs)
    return {value.name: name for name, value in graph.outputs.items() if isinstance(value, Source)}
