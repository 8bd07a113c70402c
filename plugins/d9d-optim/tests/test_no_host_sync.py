from __future__ import annotations

import pytest
import torch
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.base import NamedOptimizer
from d9d_optim.optimizer.config import AdamWConfig, SGDConfig
from d9d_optim.optimizer.sgd import SGD
from torch import nn

MAKERS = {
    "adamw": lambda named: AdamW(AdamWConfig(), named),
    "sgd": lambda named: SGD(SGDConfig(lr=0.1, momentum=0.9), named),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", MAKERS)
def test_step_never_waits_for_the_device(kind: str) -> None:
    named = {
        "weight": nn.Parameter(torch.ones(8, 8, device="cuda")),
        "bias": nn.Parameter(torch.ones(8, device="cuda")),
    }
    optimizer: NamedOptimizer = MAKERS[kind](named)
    optimizer.init_state()
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    gate = torch.tensor(True, device="cuda")
    optimizer.step(gate)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(gate)
    finally:
        torch.cuda.set_sync_debug_mode("default")
