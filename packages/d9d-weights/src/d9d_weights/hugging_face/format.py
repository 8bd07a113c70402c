"""Interface of a model's Hugging Face format: ``config.json``, and names and layouts of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from d9d_weights.graph.base import Mapper

__all__ = ["HuggingFaceFormat", "NamesAdapters"]


class HuggingFaceFormat(Protocol):
    """Hugging Face format of a model."""

    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        """Contents of ``config.json`` for a config and a dtype of parameters, such as ``"float32"``."""
        ...

    def config_from_json(self, data: Mapping[str, Any]) -> Any:
        """Config of the model that a ``config.json`` describes.

        Raises:
            CheckpointError: the file describes another architecture, or a variant that this model does not support.
        """
        ...

    def importer(self, config: Any, stored: Any) -> Mapper:
        """Mapper from tensors in Hugging Face files to the model's tensors.

        Args:
            config: config of the model to load into.
            stored: config from the files' ``config.json`` by :meth:`config_from_json`; it may differ from ``config``,
                for example in its heads. The mapper declares tensors that the files lack on purpose with ``Fresh``.
        """
        ...

    def exporter(self, config: Any) -> Mapper:
        """Mapper from the model's tensors to tensors in Hugging Face files. Tied weights appear once."""
        ...


@runtime_checkable
class KeepsFields(Protocol):
    """Optional protocol of a format: exports keep fields of the ``config.json`` of the pretrained weights."""

    def kept_fields(self, source: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Fields of ``source`` that also apply to the trained model and that ``config_json`` does not produce.

        Args:
            source: ``config.json`` of the pretrained weights.
            config: config of the trained model.
        """
        ...


@runtime_checkable
class NamesAdapters(Protocol):
    """Optional protocol of a format whose adapter files use other tensor names than its weight files."""

    def adapter_names(self, config: Any) -> Mapper:
        """Mapper from the model's names to the names in the model that the ``peft`` library adapts."""
        ...
