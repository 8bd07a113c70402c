"""Configs of the writers ``jsonl`` and ``parquet``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import PositiveInt


class JsonlWriterConfig(PluginConfig):
    """Writer of one JSON object per row."""

    name: Literal["jsonl"] = "jsonl"
    """Selects the plugin."""


class ParquetWriterConfig(PluginConfig):
    """Writer of Parquet; needs ``pip install pyarrow``."""

    name: Literal["parquet"] = "parquet"
    """Selects the plugin."""
    compression: Literal["zstd", "snappy", "none"] = "zstd"
    """Compression of the columns."""
    row_group: PositiveInt = 4096
    """Rows of a row group: what a reader takes into memory at a time."""
