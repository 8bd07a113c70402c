"""torch's schedulers as schedules of a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_optim.schedule.config import TorchScheduleConfig
from d9d_optim.schedule.torch_scheduler import torch_scheduler

WHERE = "torch.optim.lr_scheduler"


def halved(step: int) -> float:
    return 0.5**step


def climbing(step: int) -> float:
    return -float(step)


def factors(name: str, total: int, **arguments: Any) -> list[float]:
    schedule = torch_scheduler(TorchScheduleConfig(target=f"{WHERE}.{name}", arguments=arguments), total)
    return [schedule(step) for step in range(total)]


def stepped(name: str, total: int, **arguments: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.1}), ("StepLR", {"step_size": 3}), ("LinearLR", {})],
)
def test_factors_are_the_rates_of_a_loop_over_the_scheduler(name: str, arguments: dict[str, Any]) -> None:
    assert factors(name, 12, **arguments) == stepped(name, 12, **arguments)


def test_functions_are_named_by_their_import_path() -> None:
    assert factors("LambdaLR", 4, lr_lambda=f"{__name__}:halved") == [1.0, 0.5, 0.25, 0.125]


def test_the_length_of_the_run_is_filled_in() -> None:
    known = stepped("OneCycleLR", 9, max_lr=2.0, total_steps=10, cycle_momentum=False)
    assert factors("OneCycleLR", 10, max_lr=2.0) == [*known, pytest.approx(2.0 / 25 / 1e4)]
    assert factors("CosineAnnealingLR", 10) == stepped("CosineAnnealingLR", 10, T_max=10)


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (f"{WHERE}.ReduceLROnPlateau", {}, "depends on metrics, not only on the step"),
        (f"{WHERE}.StepLr", {"step_size": 2}, "has no 'StepLr'; did you mean .*StepLR"),
        ("torch.optim.SGD", {}, "not a subclass of .*LRScheduler"),
        ("nowhere.at_all", {}, "there is no module 'nowhere'"),
        ("StepLR", {}, "is not an import path; write package.module.name"),
        (f"{WHERE}.StepLR", {"step_sise": 2}, "arguments.step_sise: .*did you mean 'step_size'"),
        (f"{WHERE}.StepLR", {}, "refuses the arguments: .*step_size"),
        (f"{WHERE}.OneCycleLR", {"max_lr": 1.0, "cycle_momentum": True}, "may set only the learning rate"),
    ],
)
def test_what_is_no_schedule_is_an_error(target: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        torch_scheduler(TorchScheduleConfig(target=target, arguments=arguments), 10)


def test_a_negative_learning_rate_is_an_error() -> None:
    with pytest.raises(JobError, match="returns -1.0 in step 1"):
        factors("LambdaLR", 4, lr_lambda=f"{__name__}:climbing")


def test_after_its_last_step_a_scheduler_keeps_its_factor() -> None:
    schedule = torch_scheduler(TorchScheduleConfig(target=f"{WHERE}.OneCycleLR", arguments={"max_lr": 2.0}), 4)
    assert schedule(100) == schedule(3)
    halves = torch_scheduler(
        TorchScheduleConfig(target=f"{WHERE}.LambdaLR", arguments={"lr_lambda": f"{__name__}:halved"}), 3
    )
    assert [halves(step) for step in (2, 0, 1, 5)] == [0.25, 1.0, 0.5, 0.25]


def test_the_length_of_a_one_cycle_may_be_given_in_epochs() -> None:
    known = stepped("OneCycleLR", 6, max_lr=2.0, epochs=2, steps_per_epoch=3, cycle_momentum=False)
    assert factors("OneCycleLR", 6, max_lr=2.0, epochs=2, steps_per_epoch=3) == known
    assert factors("OneCycleLR", 6, max_lr=2.0, total_steps=6, cycle_momentum=False) == known


def test_an_argument_like_no_other_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(JobError) as error:
        factors("StepLR", 4, step_size=2, zzz=1)
    assert str(error.value) == (
        "lr_schedule.arguments.zzz: torch.optim.lr_scheduler.StepLR takes no such argument; it takes: step_size, "
        "gamma, last_epoch"
    )
    with pytest.raises(JobError, match="LRScheduler is not a subclass of"):
        torch_scheduler(TorchScheduleConfig(target=f"{WHERE}.LRScheduler"), 10)
