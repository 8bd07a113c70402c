"""Writer of Parquet files, ``parquet``, with the library pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from d9d_core.inference import Columns

from d9d_inference.config import ParquetWriterConfig


class ParquetWriter:
    """Writes Parquet files. Arrays become lists, matrices become lists of lists.

    Args:
        config: compression and size of row groups.
    """

    def __init__(self, config: ParquetWriterConfig) -> None:
        self.config = config

    @property
    def suffix(self) -> str:
        """Suffix of the output files."""
        return ".parquet"

    def write(self, path: Path, rows: Columns) -> None:
        """Write rows as a new Parquet file with one row group."""
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet

        table = pa.table({name: pa.array([_plain(value) for value in values]) for name, values in rows.items()})
        parquet.write_table(table, path, compression=self.config.compression)

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Copy the rows of all parts into row groups of equal size, independent of the parts' sizes."""
        import pyarrow as pa
        from pyarrow import parquet

        schema = pa.unify_schemas([parquet.read_schema(part) for part in parts], promote_options="permissive")
        with parquet.ParquetWriter(path, schema, compression=self.config.compression) as writer:
            for table in self._groups(parts, schema):
                writer.write_table(table, row_group_size=self.config.row_group)

    def _groups(self, parts: Sequence[Path], schema: Any) -> Iterator[Any]:
        """Yield tables of ``row_group`` rows each, and the remaining rows."""
        import pyarrow as pa
        from pyarrow import parquet

        waiting = schema.empty_table()
        for part in parts:
            waiting = pa.concat_tables([waiting, parquet.read_table(part).cast(schema)])
            while waiting.num_rows >= self.config.row_group:
                # Combine chunks, so that written rows are freed and the output does not depend on the parts' chunks.
                yield waiting.slice(0, self.config.row_group).combine_chunks()
                waiting = waiting.slice(self.config.row_group).combine_chunks()
        if waiting.num_rows:
            yield waiting.combine_chunks()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, np.ndarray) and value.ndim > 1 else value
