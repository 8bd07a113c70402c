"""Job file section ``logging``: logged values and log messages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from d9d_core.config import Section

__all__ = ["Logging"]


class Logging(Section):
    """Interval of logging, device statistics to log, and the level of log messages."""

    every: PositiveInt = 10
    """Steps between two logged steps; the first and the last step are always logged."""
    max_pending: NonNegativeInt = 2
    """On a GPU, number of steps that the host may launch beyond the newest step whose values it has; 0 waits for the
    values of each step."""
    peak_tflops: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Peak speed of one device in TFLOP/s, for the series ``mfu``; by default, the vendor's figure for dense bfloat16,
    on known GPUs."""
    memory: bool | None = None
    """Log the peak memory of the first process since its start: device memory on a GPU, resident memory on a CPU; by
    default on GPUs only."""
    level: Literal["debug", "info", "warning", "error"] | None = None
    """Lowest level of printed messages from loggers of the engine and of plugins (``d9d`` and below); by default
    ``info`` on the first process and ``warning`` on the others."""
