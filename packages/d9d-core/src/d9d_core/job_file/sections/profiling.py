"""Job file section ``profiling``: traces of some steps."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt, model_validator

from d9d_core.config import Section

__all__ = ["Profiling"]


class Profiling(Section):
    """Profiling of the last steps of each cycle, with a Chrome trace per process and a table of time per kind of op."""

    every: PositiveInt = 100
    """Steps of a cycle, counted from step 0 even in a resumed run; the trace ends with the cycle's last step."""
    warmup: NonNegativeInt = 1
    """Steps before the recorded ones in which the profiler runs but keeps nothing, so that its start-up is not
    recorded.
    """
    active: PositiveInt = 3
    """Recorded steps."""
    record_shapes: bool = False
    """Record the shapes of operations' inputs."""
    with_stack: bool = False
    """Record the Python stack of each operation; slower."""
    memory: bool = False
    """Record allocations of operations and, on CUDA, write a snapshot of device memory after the cycle."""

    @model_validator(mode="after")
    def _check_cycle(self) -> Profiling:
        if self.warmup + self.active > self.every:
            raise ValueError(
                f"warmup {self.warmup} and active {self.active} are {self.warmup + self.active} steps, more than the "
                f"{self.every} of a cycle; raise every or lower the others"
            )
        return self
