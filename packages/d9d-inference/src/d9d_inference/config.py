"""Configs of the writers ``jsonl`` and ``parquet``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import PositiveInt


class JsonlWriterConfig(PluginConfig):
    """Writes one JSON object per row."""

    name: Literal["jsonl"] = "jsonl"
    """Selects this writer."""


class ParquetWriterConfig(PluginConfig):
    """Writes Parquet files; needs ``pip install pyarrow``."""

    name: Literal["parquet"] = "parquet"
    """Selects this writer."""
    compression: Literal["zstd", "snappy", "none"] = "zstd"
    """Compression of the columns."""
    row_group: PositiveInt = 4096
    """Number of rows in a row group, which a reader loads at once."""
