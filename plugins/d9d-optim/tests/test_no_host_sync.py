from __future__ import annotations

import pytest
import torch
from d9d_core.optimizer import DividesGradients
from d9d_optim.optimizer.adam import Adam
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.any_torch import TorchOptimizer
from d9d_optim.optimizer.config import (
    AdamConfig,
    AdamWConfig,
    EmaConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeConfig,
    SGDConfig,
    StochasticAdamWConfig,
    TorchConfig,
)
from d9d_optim.optimizer.ema import Ema
from d9d_optim.optimizer.lion import Lion
from d9d_optim.optimizer.muon import Muon
from d9d_optim.optimizer.schedule_free import ScheduleFree
from d9d_optim.optimizer.sgd import SGD
from d9d_optim.optimizer.stochastic_adamw import StochasticAdamW
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

MAKERS = {
    "adamw": lambda named: AdamW(AdamWConfig(), named),
    "adam": lambda named: Adam(AdamConfig(amsgrad=True), named),
    "sgd": lambda named: SGD(SGDConfig(lr=0.1, momentum=0.9), named),
    "sgd_dampened": lambda named: SGD(SGDConfig(lr=0.1, momentum=0.9, dampening=0.5), named),
    "lion": lambda named: Lion(LionConfig(), named),
    "stochastic_adamw": lambda named: StochasticAdamW(StochasticAdamWConfig(), named),
    "muon": lambda named: Muon(MuonConfig(), named),
    "schedule_free": lambda named: ScheduleFree(ScheduleFreeConfig(), named),
    "ema": lambda named: Ema(EmaConfig(of=LionConfig()), named, Lion),
    "torch": lambda named: TorchOptimizer(TorchConfig(target="torch.optim.RAdam", lr=0.1), named),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", MAKERS)
def test_step_never_waits_for_the_device(kind: str) -> None:
    named = {
        "weight": nn.Parameter(torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)),
        "bias": nn.Parameter(torch.ones(8, device="cuda", dtype=torch.bfloat16)),
    }
    optimizer: DividesGradients = MAKERS[kind](named)
    optimizer.init_state()
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    gate = torch.tensor(True, device="cuda")
    divisor = torch.tensor(2.0, device="cuda")
    optimizer.step(gate)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.divide_gradients(divisor)
        optimizer.step(gate)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("divides", [False, True])
# Fused kernels take tensors without contents, but update none; the optimizer "torch" reads them when it is made.
@pytest.mark.parametrize("kind", sorted(MAKERS.keys() - {"adam", "adamw", "sgd", "torch"}))
def test_parameters_in_the_memory_of_the_host_are_updated_beside_those_of_a_device(kind: str, divides: bool) -> None:
    """With the gate and the divisor on the device; tensors without contents say where operations would mix both."""
    with FakeTensorMode():
        named = {
            name: nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16, device=device))
            for name, device in (("here", "cuda"), ("there", "cpu"))
        }
        optimizer: DividesGradients = MAKERS[kind](named)
        optimizer.init_state()
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        if divides:
            optimizer.divide_gradients(torch.ones((), device="cuda"))
        versions = [parameter._version for parameter in named.values()]
        optimizer.step(torch.ones((), dtype=torch.bool, device="cuda"))
    assert all(parameter._version > version for parameter, version in zip(named.values(), versions, strict=True))
