"""The base learning rate in every step."""

from __future__ import annotations

from d9d_core.extend import LrSchedule

from d9d_optim.schedule.config import ConstantConfig


def constant(config: ConstantConfig, total_steps: int) -> LrSchedule:  # noqa: ARG001 - the signature of LrScheduleSpec
    """A schedule that is 1 in every step."""
    return lambda step: 1.0  # noqa: ARG005 - the same for all steps
