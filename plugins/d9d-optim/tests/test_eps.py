"""The field ``eps`` of each optimizer of the Adam family is the constant added to the root of the second moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from d9d_core.optimizer import Optimizer
from d9d_optim.optimizer.adam import Adam
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.config import (
    AdamConfig,
    AdamWConfig,
    AdamWPart,
    MuonConfig,
    ScheduleFreeConfig,
    StochasticAdamWConfig,
)
from d9d_optim.optimizer.muon import Muon
from d9d_optim.optimizer.schedule_free import ScheduleFree
from d9d_optim.optimizer.stochastic_adamw import StochasticAdamW
from torch import nn

LR, EPS = 0.1, 0.5
Make = Callable[[dict[str, nn.Parameter]], Optimizer]


@pytest.mark.parametrize(
    "make",
    [
        lambda named: AdamW(AdamWConfig(lr=LR, eps=EPS), named),
        lambda named: Adam(AdamConfig(lr=LR, eps=EPS), named),
        lambda named: StochasticAdamW(StochasticAdamWConfig(lr=LR, eps=EPS), named),
        lambda named: ScheduleFree(ScheduleFreeConfig(lr=LR, eps=EPS), named),
        lambda named: Muon(MuonConfig(adamw=AdamWPart(lr=LR, eps=EPS)), named),
    ],
    ids=["adamw", "adam", "stochastic_adamw", "schedule_free", "muon.adamw"],
)
def test_the_first_step_is_divided_by_the_gradient_and_eps(make: Make) -> None:
    before, gradient = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, -0.25, 0.0])
    named = {"bias": nn.Parameter(before.clone()), "matrix": nn.Parameter(torch.eye(2, dtype=torch.bfloat16))}
    optimizer = make(named)
    optimizer.init_state()
    named["bias"].grad, named["matrix"].grad = gradient.clone(), torch.eye(2, dtype=torch.bfloat16)
    optimizer.step(torch.tensor(True))
    expected = before - LR * gradient / (gradient.abs() + EPS)
    torch.testing.assert_close(named["bias"].detach(), expected)
