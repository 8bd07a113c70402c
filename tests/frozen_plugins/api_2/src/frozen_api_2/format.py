"""Hugging Face format; imports no torch."""

from collections.abc import Mapping
from typing import Any

from frozen_api_2.config import ChainConfig


class ChainFormat:
    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        return {"model_type": "frozen_chain", "width": config.width, "depth": config.depth, "dtype": dtype}

    def config_from_json(self, data: Mapping[str, Any]) -> ChainConfig:
        return ChainConfig(width=data["width"], depth=data["depth"])

    def importer(self, _config: Any, _stored: Any) -> Any:
        from d9d_weights.graph.select import Select

        return Select("chain")

    def exporter(self, config: Any) -> Any:
        return self.importer(config, config).inverse()
