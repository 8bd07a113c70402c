"""Section of a job file on log entries and log lines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from d9d_core.config import Section

__all__ = ["Logging"]


class Logging(Section):
    """Interval of log entries, what the loop logs of the device, and the level of log lines."""

    every: PositiveInt = 10
    """Steps between two log entries; the first and the last step are always logged."""
    max_pending: NonNegativeInt = 2
    """Steps that the host may be ahead of the values it has seen, on a GPU; 0 waits for each step."""
    peak_tflops: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Peak of one device in TFLOP/s, for the series ``mfu``; by default the vendor's for dense bfloat16, on GPUs that
    are known."""
    memory: bool | None = None
    """Log the peaks of memory so far, of the first process; by default on GPUs only."""
    level: Literal["debug", "info", "warning", "error"] | None = None
    """Least level of what the loggers of the engine and of plugins (``d9d`` and below) print; by default ``info`` on
    the first process and ``warning`` on the others."""
