"""Linear warm-up and cosine decay (Loshchilov and Hutter, SGDR, equation 5, without restarts)."""

from __future__ import annotations

from d9d_core.extend import JobError, LrSchedule

from d9d_optim.schedule.config import CosineConfig, Phase
from d9d_optim.schedule.piecewise import Chain, Piece


def cosine(config: CosineConfig, total_steps: int) -> LrSchedule:
    """Warm up for ``warmup_steps``, then decay to ``min_factor``, which the last step uses.

    Raises:
        JobError: the warm-up leaves no step for the decay.
    """
    if config.warmup_steps >= total_steps:
        raise JobError(
            f"lr_schedule.warmup_steps is {config.warmup_steps}, but the run has {total_steps} steps; "
            f"use at most {total_steps - 1}, or train longer"
        )
    decay = Piece(config.warmup_steps, total_steps, 1.0, Phase(to=config.min_factor, curve="cosine"))
    if config.warmup_steps == 0:
        return Chain((decay,))
    return Chain((Piece(0, config.warmup_steps, 0.0, Phase(to=1.0)), decay))
