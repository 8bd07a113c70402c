"""Section of a job file on traces of some steps."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt, model_validator

from d9d_core.config import Section

__all__ = ["Profiling"]


class Profiling(Section):
    """Profiling of the last steps of each cycle, with a Chrome trace per process and a table of the time by kind."""

    every: PositiveInt = 100
    """Steps of a cycle, counted from step 0 whatever was resumed; the trace ends with the cycle's last step."""
    warmup: NonNegativeInt = 1
    """Steps before the recorded ones in which the profiler runs and nothing is kept, so that its start is not seen."""
    active: PositiveInt = 3
    """Steps that are recorded."""
    record_shapes: bool = False
    """Record the shapes of what operations get."""
    with_stack: bool = False
    """Record the lines of Python code behind each operation; slower."""
    memory: bool = False
    """Record what operations allocate and, on CUDA, write what the memory of the device holds after the cycle."""

    @model_validator(mode="after")
    def _window_fits_into_the_cycle(self) -> Profiling:
        if self.warmup + self.active > self.every:
            raise ValueError(
                f"warmup {self.warmup} and active {self.active} are {self.warmup + self.active} steps, more than the "
                f"{self.every} of a cycle; raise every or lower the others"
            )
        return self
