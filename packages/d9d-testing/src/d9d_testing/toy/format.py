"""The toy model's files of Hugging Face. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from d9d_testing.toy.config import ToyModelConfig

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper


class ToyFormat:
    """Toy format of exported weights: the model's tensors under other names."""

    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        """Just the sizes."""
        return {"model_type": "toy", "features": config.features, "dtype": dtype}

    def config_from_json(self, data: Mapping[str, Any]) -> ToyModelConfig:
        """The width; whoever loads knows the rest."""
        return ToyModelConfig(features=data["features"])

    def importer(self, _config: Any, _stored: Any) -> Mapper:
        """Remove the prefix."""
        from d9d_weights.graph.select import Select

        return Select("toy")

    def exporter(self, config: Any) -> Mapper:
        """Prefix every name."""
        return self.importer(config, config).inverse()
