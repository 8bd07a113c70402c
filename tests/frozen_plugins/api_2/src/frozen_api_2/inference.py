"""Inference task and writer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d9d_core.inference import ROW, Columns
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from frozen_api_2.config import RowsConfig, TableConfig


class Rows:
    columns = {ROW: "number of the sample", "mean": "mean of its outputs"}

    def __init__(self, config: RowsConfig) -> None:
        pass

    def check(self, model: Any, facts: State) -> None:
        pass

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        return StageInputs(first={"x": microbatch["x"]})

    def process(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        return {"mean": outputs["y"].float().mean(-1)}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        return {ROW: kept["rows"].tolist(), "mean": kept["mean"].tolist()}

    def tally(self, rows: Columns) -> Mapping[str, float]:
        return {"rows": float(len(rows[ROW])), "mean": float(sum(rows["mean"]))}

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        return {"frozen_mean_output": sums["mean"] / sums["rows"]}


class TableWriter:
    suffix = ".tsv"

    def __init__(self, config: TableConfig) -> None:
        pass

    def write(self, path: Path, rows: Columns) -> None:
        path.write_text("".join("\t".join(map(str, row)) + "\n" for row in zip(*rows.values(), strict=True)))

    def join(self, parts: Sequence[Path], path: Path) -> None:
        with path.open("w") as output:
            output.writelines(part.read_text() for part in parts)
