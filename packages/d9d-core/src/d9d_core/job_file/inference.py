"""Job file of inference: a model, data, and what to write of each row. No optimizer, no steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveInt

from d9d_core.config import PluginConfig
from d9d_core.job_file.job import BaseJob, Batch
from d9d_core.job_file.open_union import Named


class InferenceBatch(Batch):
    """Numbers of samples between two progress points and per forward pass."""

    size: PositiveInt = 512
    """Samples between two progress points, over all processes: the most that a kill costs."""
    microbatch: PositiveInt | None = 8
    """Samples per forward pass on one process; null takes all of a process's share."""


class InferenceConfig(BaseJob):
    """Job file of inference. See :class:`d9d_inference.job.InferenceJob` for what can be done with it."""

    task: Annotated[PluginConfig, Named("inference task")]
    """Inference task: what is written of each row."""
    writer: Annotated[PluginConfig, Named("writer")]
    """Format of the output, <run>/output with the format's suffix."""
    batch: InferenceBatch = InferenceBatch()
    """Samples at a time."""
    limit: PositiveInt | None = None
    """Only the first samples; null takes all."""
    too_long: Literal["error", "cut"] = "error"
    """Rows that are longer than a sample, or left out: an error before anything runs, or they are cut and left out as
    the dataset does in training."""
    nonfinite: Literal["error", "keep"] = "error"
    """NaN or infinity in a row: an error that names it, or written as the format can (``null`` in JSON)."""
