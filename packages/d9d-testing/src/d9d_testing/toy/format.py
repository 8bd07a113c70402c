"""Hugging Face format of the toy model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from d9d_testing.toy.config import ToyModelConfig

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper


class ToyFormat:
    """Hugging Face format in which the toy model's tensors have a prefix."""

    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        """Contents of ``config.json``: only the sizes."""
        return {"model_type": "toy", "features": config.features, "dtype": dtype}

    def config_from_json(self, data: Mapping[str, Any]) -> ToyModelConfig:
        """Config with the stored width; other fields have their defaults."""
        return ToyModelConfig(features=data["features"])

    def importer(self, _config: Any, _stored: Any) -> Mapper:
        """Mapper that removes the prefix from the names of stored tensors."""
        from d9d_weights.graph.select import Select

        return Select("toy")

    def exporter(self, config: Any) -> Mapper:
        """Mapper that adds the prefix to the names of the model's tensors."""
        return self.importer(config, config).inverse()
