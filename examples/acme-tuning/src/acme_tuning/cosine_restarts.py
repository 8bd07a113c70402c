"""Learning-rate schedule ``cosine_restarts``: Loshchilov and Hutter 2017, "SGDR", equation 5."""

from __future__ import annotations

import math

from d9d_core.optimizer import LrSchedule

from acme_tuning.config import CosineRestartsConfig


def cosine_restarts(config: CosineRestartsConfig, total_steps: int) -> LrSchedule:  # noqa: ARG001 - cycles never end
    """Factor on the base learning rate: falls from 1 to ``floor`` by a cosine in each cycle."""

    def factor(step: int) -> float:
        begin, length = 0, config.cycle
        while config.growth > 1 and step >= begin + length:
            begin, length = begin + length, length * config.growth
        done = (step - begin) % length / length
        return config.floor + (1 - config.floor) * (1 + math.cos(math.pi * done)) / 2

    return factor
