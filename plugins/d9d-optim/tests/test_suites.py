"""Optimizers and learning-rate schedules keep what holds for every one."""

from __future__ import annotations

from typing import ClassVar

import pytest
from d9d_testing.suites.lr_schedule import LrScheduleSuite
from d9d_testing.suites.optimizer import OptimizerSuite


@pytest.mark.thorough
class TestAdamW(OptimizerSuite):
    target = "adamw"


@pytest.mark.thorough
class TestAdamWWithGroups(OptimizerSuite):
    target = "adamw"
    config: ClassVar = {"lr": 0.01, "state_dtype": "float32", "groups": [{"match": "embed.*", "lr_scale": 0.1}]}


@pytest.mark.thorough
class TestAdamWWithMasterWeights(OptimizerSuite):
    target = "adamw"
    dtypes: ClassVar = ("bfloat16",)
    config: ClassVar = {"lr": 0.01, "master_weights": True}


@pytest.mark.thorough
class TestSGD(OptimizerSuite):
    target = "sgd"
    config: ClassVar = {"lr": 0.1, "weight_decay": 0.01}


@pytest.mark.thorough
class TestSGDWithMomentum(OptimizerSuite):
    target = "sgd"
    config: ClassVar = {"lr": 0.1, "momentum": 0.9, "nesterov": True}


class TestSGDWithDampening(OptimizerSuite):
    target = "sgd"
    dtypes: ClassVar = ("float32",)
    config: ClassVar = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}


class TestAdam(OptimizerSuite):
    target = "adam"
    dtypes: ClassVar = ("float32",)
    config: ClassVar = {"weight_decay": 0.1, "amsgrad": True, "maximize": True}


@pytest.mark.thorough
class TestLion(OptimizerSuite):
    target = "lion"
    config: ClassVar = {"lr": 0.01}


@pytest.mark.thorough
class TestStochasticAdamW(OptimizerSuite):
    target = "stochastic_adamw"
    config: ClassVar = {"lr": 0.01}
    dtypes: ClassVar = ("bfloat16",)
    linear_in_lr = False  # each update is rounded at random


class TestStochasticAdamWWithNarrowMoments(TestStochasticAdamW):
    config: ClassVar = {"lr": 0.01, "state_dtype": "parameter"}


@pytest.mark.thorough
class TestMuon(OptimizerSuite):
    target = "muon"
    config: ClassVar = {"lr": 0.02}


@pytest.mark.thorough
class TestScheduleFree(OptimizerSuite):
    target = "schedule_free"
    config: ClassVar = {"lr": 0.01, "weight_decay": 0.1}


@pytest.mark.thorough
class TestEma(OptimizerSuite):
    target = "ema"
    config: ClassVar = {"decay": 0.5, "of": {"name": "adamw", "lr": 0.01}}


@pytest.mark.thorough
class TestTorchRMSprop(OptimizerSuite):
    target = "torch"
    dtypes: ClassVar = ("float32",)
    config: ClassVar = {"target": "torch.optim.RMSprop", "lr": 0.01, "arguments": {"momentum": 0.9}}


@pytest.mark.thorough
class TestTorchFusedAdam(OptimizerSuite):
    target = "torch"
    dtypes: ClassVar = ("float32",)
    config: ClassVar = {
        "target": "torch.optim.Adam",
        "lr": 0.01,
        "weight_decay": 0.1,
        "arguments": {"fused": True, "betas": [0.9, 0.99]},
        "groups": [{"match": "embed.*", "lr_scale": 0.1}],
    }


@pytest.mark.gpu
class TestAdamWOnCuda(TestAdamWWithGroups):
    device = "cuda"


@pytest.mark.gpu
class TestSGDOnCuda(TestSGD):
    device = "cuda"


@pytest.mark.gpu
class TestSGDWithMomentumOnCuda(TestSGDWithMomentum):
    device = "cuda"


class TestConstant(LrScheduleSuite):
    target = "constant"


class TestCosine(LrScheduleSuite):
    target = "cosine"
    config: ClassVar = {"warmup_steps": 10}


class TestPiecewise(LrScheduleSuite):
    target = "piecewise"
    config: ClassVar = {"phases": [{"steps": 5, "to": 1.0}, {"until": 0.5, "to": 1.0}, {"to": 0.1, "curve": "poly"}]}


class TestPiecewiseWithEveryCurve(LrScheduleSuite):
    target = "piecewise"
    config: ClassVar = {
        "phases": [
            {"steps": 4, "to": 1.0, "curve": "poly_late", "power": 3},
            {"steps": 5, "to": 0.5, "curve": "inverse_sqrt"},
            {"until": 0.7, "to": 0.2, "curve": "d9d_optim.schedule.curves:cosine"},
            {"to": 0.0, "curve": "exponential", "floor": 0.001},
        ]
    }


class TestLinear(LrScheduleSuite):
    target = "linear"
    config: ClassVar = {"warmup_steps": 10}


class TestWarmupStableDecay(LrScheduleSuite):
    target = "warmup_stable_decay"
    config: ClassVar = {"warmup_steps": 3, "decay_fraction": 0.25, "curve": "cosine"}


class TestInverseSqrt(LrScheduleSuite):
    target = "inverse_sqrt"
    config: ClassVar = {"warmup_steps": 10}


class TestTorchOneCycle(LrScheduleSuite):
    target = "torch"
    config: ClassVar = {"target": "torch.optim.lr_scheduler.OneCycleLR", "arguments": {"max_lr": 1.0}}
