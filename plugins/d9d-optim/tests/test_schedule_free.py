"""Schedule-free AdamW against the formulas of its paper."""

from __future__ import annotations

import pytest
import torch
from d9d_optim.optimizer.config import ScheduleFreeConfig
from d9d_optim.optimizer.schedule_free import ScheduleFree
from torch import Tensor, nn


def gradient(step: int) -> Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@pytest.mark.thorough
@pytest.mark.parametrize("power", [2.0, 0.5])
def test_steps_follow_the_three_sequences_of_the_paper(power: float) -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    config = ScheduleFreeConfig(lr=0.1, betas=(0.9, 0.99), weight_power=power)
    optimizer = ScheduleFree(config, {"p": parameter})
    optimizer.init_state()
    x = z = parameter.detach().clone()
    square, weights = torch.zeros(6, dtype=torch.float64), 0.0
    for step in range(5):
        factor = min(1.0, (step + 1) / 3)
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(parameter.detach(), y, rtol=1e-6, atol=1e-6)
        parameter.grad = gradient(step)
        optimizer.set_lr_factor(factor)
        optimizer.step(torch.tensor(True))
        rate = 0.1 * factor
        square = 0.99 * square + 0.01 * gradient(step) ** 2
        z = z - rate * gradient(step) / ((square / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8)
        weights += rate**power
        x = x + rate**power / weights * (z - x)
    training = parameter.detach().clone()
    with optimizer.evaluation_weights():
        torch.testing.assert_close(parameter.detach(), x, rtol=1e-6, atol=1e-6)
    assert torch.equal(parameter, training)


def test_training_weights_come_back_after_an_exception() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ScheduleFree(ScheduleFreeConfig(lr=0.1), {"p": parameter})
    optimizer.init_state()
    for step in range(2):
        parameter.grad = gradient(step)[:3].float()
        optimizer.step(torch.tensor(True))
    training = parameter.detach().clone()
    with pytest.raises(AssertionError, match="averages"), optimizer.evaluation_weights():
        assert torch.equal(parameter, training), "averages"
    assert torch.equal(parameter, training)


def test_a_learning_rate_of_zero_at_first_moves_nothing() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ScheduleFree(ScheduleFreeConfig(lr=0.1), {"p": parameter})
    optimizer.init_state()
    optimizer.set_lr_factor(0.0)
    parameter.grad = torch.ones(3)
    optimizer.step(torch.tensor(True))
    assert torch.equal(parameter.detach(), torch.ones(3))


def test_weight_decay_acts_at_the_training_weights() -> None:
    parameter = nn.Parameter(torch.full((1, 1), 2.0, dtype=torch.float64))
    config = ScheduleFreeConfig(lr=0.1, betas=(0.5, 0.75), eps=1.0, weight_decay=0.5)
    optimizer = ScheduleFree(config, {"p": parameter})
    optimizer.init_state()
    x = z = 2.0
    for step in range(3):
        y = (x + z) / 2
        assert parameter.item() == pytest.approx(y)
        parameter.grad = torch.full_like(parameter, 3.0)
        optimizer.step(torch.tensor(True))
        z -= 0.1 * (3.0 / (3.0 + 1.0) + 0.5 * y)
        x += (z - x) / (step + 1)
        with optimizer.evaluation_weights():
            assert parameter.item() == pytest.approx(x)
