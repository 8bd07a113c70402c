"""Adapter for torch's learning-rate schedulers that depend only on the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from d9d_core.config import closest
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import JobError
from d9d_core.optimizer import LrSchedule
from torch.optim.lr_scheduler import LRScheduler

from d9d_optim.imports import import_path
from d9d_optim.schedule.config import TorchScheduleConfig

#: Names of scheduler arguments that get the number of the run's steps by default.
_LENGTHS = ("total_steps", "T_max")


def torch_scheduler(config: TorchScheduleConfig, total_steps: int) -> LrSchedule:
    """Schedule from a torch scheduler, which is stepped through the whole run once, with a base learning rate of 1.

    The scheduler is stepped when a factor is first read, so a call of the schedule raises a ``JobError`` if a later
    factor is negative or not finite.

    Raises:
        JobError: the path names no such class, the class depends on more than the step, an argument does not fit, or
            the first factor is negative or not finite.
    """
    found = _scheduler_class(config)
    factors = _factors(found, _arguments(found, config, total_steps), config.target)
    known: list[float] = []

    def factor(step: int) -> float:
        step = min(step, total_steps - 1)  # some schedulers raise after their last step
        while len(known) <= step:
            known.append(next(factors))
        return known[step]

    factor(0)  # reports invalid arguments before the run
    return factor


def _factors(found: type[LRScheduler], arguments: dict[str, Any], target: str) -> Iterator[float]:
    """Yield the factors of all steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        scheduler = found(optimizer, **arguments)
    except FOREIGN_FAILURES as error:
        raise JobError(f"lr_schedule.arguments: {target} refuses the arguments: {error}") from error
    step = 0
    while True:
        value = float(optimizer.param_groups[0]["lr"])
        if not math.isfinite(value) or value < 0:
            raise JobError(
                f"lr_schedule: {target} returns {value} in step {step}; a factor must be finite and not negative"
            )
        yield value
        optimizer.step()
        scheduler.step()
        step += 1


def _scheduler_class(config: TorchScheduleConfig) -> type[LRScheduler]:
    found: Any = import_path("lr_schedule.target", config.target)
    if not (isinstance(found, type) and issubclass(found, LRScheduler)) or found is LRScheduler:
        raise JobError(f"lr_schedule.target: {config.target} is not a subclass of torch.optim.lr_scheduler.LRScheduler")
    step = list(inspect.signature(found.step).parameters.values())[1:]
    if needed := [parameter.name for parameter in step if parameter.default is parameter.empty]:
        raise JobError(
            f"lr_schedule.target: {config.target} depends on {', '.join(needed)}, not only on the step, so a resumed "
            "run could not repeat it; use a scheduler whose step() needs no arguments"
        )
    return found


def _arguments(found: type[LRScheduler], config: TorchScheduleConfig, total_steps: int) -> dict[str, Any]:
    accepted = [name for name in inspect.signature(found).parameters if name != "optimizer"]
    arguments: dict[str, Any] = {name: total_steps for name in _LENGTHS if name in accepted}
    if "epochs" in config.arguments:  # alternative to total_steps in OneCycleLR
        arguments.pop("total_steps", None)
    if "cycle_momentum" in accepted:
        arguments["cycle_momentum"] = False
    for name, value in config.arguments.items():
        where = f"lr_schedule.arguments.{name}"
        if name not in accepted:
            near = closest(name, accepted)
            hint = f"did you mean '{near}'?" if near else f"it takes: {', '.join(accepted)}"
            raise JobError(f"{where}: {config.target} takes no such argument; {hint}")
        if name == "cycle_momentum" and value:
            raise JobError(f"{where}: a schedule may set only the learning rate; remove this argument")
        imported = isinstance(value, str) and ":" in value
        arguments[name] = import_path(where, value) if imported else value
    return arguments
