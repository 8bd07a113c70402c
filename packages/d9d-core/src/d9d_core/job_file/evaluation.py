"""Job file section ``evaluation``: evaluation during training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from d9d_core.config import PluginConfig, Section
from d9d_core.job_file.open_union import Named

__all__ = ["Evaluation"]

# A set's name becomes part of the names of its logged series.
SetName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


class Evaluation(Section):
    """Evaluation of losses and metrics on other data during training."""

    every: PositiveInt
    """Steps between two evaluations; there is always one after the last step."""
    packs: PositiveInt | Literal["all"] = 4
    """Number of batches of an evaluation, always the same batches; ``all`` evaluates every sample exactly once."""
    sets: dict[SetName, Annotated[PluginConfig, Named("dataset")]] = {}
    """Several datasets by name, in place of ``data``; their series are named ``eval/<name>/loss`` and so on."""
    data: Annotated[PluginConfig, Named("dataset")] | None = Field(default=None, validate_default=True)
    """Dataset of the evaluation; give either this or ``sets``."""
    metrics: list[Annotated[PluginConfig, Named("metric")]] = []
    """Metrics that are computed over all evaluated samples."""

    @field_validator("data")
    @classmethod
    def _require_one_source(cls, data: PluginConfig | None, info: ValidationInfo) -> PluginConfig | None:
        sets = info.data.get("sets")
        if data is None and sets == {}:
            raise ValueError("the data is missing; add 'data:' under 'evaluation', or 'sets:' for several datasets")
        if data is not None and sets:
            raise ValueError(
                f"'sets' already names {', '.join(sets)}; move 'data' into 'sets', or remove one of the two"
            )
        return data

    @model_validator(mode="after")
    def _refuse_duplicates(self) -> Evaluation:
        for index, metric in enumerate(self.metrics):
            if (first := self.metrics.index(metric)) != index:
                raise ValueError(f"metrics[{index}] is the same as metrics[{first}]; remove one")
        return self

    @property
    def datasets(self) -> dict[str, PluginConfig]:
        """Datasets by name; the name of a single dataset (``data``) is empty."""
        return self.sets if self.data is None else {"": self.data}
