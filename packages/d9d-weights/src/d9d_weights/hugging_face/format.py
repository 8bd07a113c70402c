"""Format of a model in Hugging Face layout: ``config.json``, names and layouts of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from d9d_weights.graph.base import Mapper

__all__ = ["HuggingFaceFormat"]


class HuggingFaceFormat(Protocol):
    """Format of a model in Hugging Face layout."""

    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        """Contents of ``config.json`` for a model of this config, with parameters of ``dtype`` (``"float32"``)."""
        ...

    def config_from_json(self, data: Mapping[str, Any]) -> Any:
        """Config of the model that a ``config.json`` describes.

        Raises:
            CheckpointError: it describes another architecture, or a variant that this model does not compute.
        """
        ...

    def importer(self, config: Any, stored: Any) -> Mapper:
        """Mapper from the names and layouts in Hugging Face files to those of the model.

        Args:
            config: of the model to be filled.
            stored: what :meth:`config_from_json` made of the files' ``config.json``; it may differ from ``config``, for
                example in its heads. What the files lack on purpose is declared with ``Fresh``.
        """
        ...

    def exporter(self, config: Any) -> Mapper:
        """Mapper from the model's names and layouts to those of Hugging Face. Tied weights appear once."""
        ...


@runtime_checkable
class KeepsFields(Protocol):
    """Optional side of a format: fields of a source's ``config.json`` outlive the training."""

    def kept_fields(self, source: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Fields that hold for the trained model too and that :meth:`HuggingFaceFormat.config_json` does not know.

        Args:
            source: the ``config.json`` beside the weights that training started from.
            config: of the trained model.
        """
        ...
