"""Job file of inference: a model, data, and an inference task that makes output rows. No optimizer, no steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveInt

from d9d_core.config import PluginConfig
from d9d_core.job_file.job import BaseJob, Batch
from d9d_core.job_file.open_union import Named


class InferenceBatch(Batch):
    """Numbers of samples between two saves of the progress, and per forward pass."""

    size: PositiveInt = 512
    """Samples of a batch, over all processes. Progress is saved when the rows of a batch are written; a kill loses only
    the batches that are being computed or written, at most four."""
    microbatch: PositiveInt | None = 8
    """Samples per forward pass on one process; null takes all of a process's share."""


class InferenceConfig(BaseJob):
    """Job file of inference. :class:`d9d_inference.job.InferenceJob` can run it."""

    task: Annotated[PluginConfig, Named("inference task")]
    """Inference task, which makes the output rows."""
    writer: Annotated[PluginConfig, Named("writer")]
    """Format of the output file, <run>/output with the format's suffix."""
    batch: InferenceBatch = InferenceBatch()
    """Batch sizes."""
    limit: PositiveInt | None = None
    """Use only the first ``limit`` samples; null uses all."""
    too_long: Literal["error", "cut"] = "error"
    """Policy for rows that are longer than a sample, or that the dataset drops: ``error`` stops before anything runs,
    ``cut`` shortens or drops the rows as the dataset does in training."""
    nonfinite: Literal["error", "keep"] = "error"
    """Policy for NaN or infinity in a row: ``error`` names the row, ``keep`` writes the value as the format can
    (``null`` in JSON)."""
