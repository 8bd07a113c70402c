"""Defaults and limits of the fields of the optimizers' and schedules' configs."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_optim.optimizer.config import (
    AdamConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeConfig,
    SGDConfig,
    StochasticAdamWConfig,
    TorchConfig,
)
from d9d_optim.schedule.config import CosineConfig, InverseSqrtConfig, LinearConfig, Phase, WarmupStableDecayConfig
from pydantic import BaseModel, ValidationError

BASE: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "groups": (), "state_dtype": None}
ADAM: dict[str, Any] = {**BASE, "betas": (0.9, 0.95), "eps": 1e-8}
ADAM_FIELDS: dict[str, Any] = {**ADAM, "amsgrad": False, "maximize": False}


@pytest.mark.parametrize(
    ("config", "given", "defaults"),
    [
        (AdamWConfig, {}, {**ADAM_FIELDS, "weight_decay": 0.1, "master_weights": False}),
        (AdamConfig, {}, {**ADAM_FIELDS, "decoupled_weight_decay": False}),
        (StochasticAdamWConfig, {}, {**ADAM, "weight_decay": 0.1, "state_dtype": "float32", "seed": 0}),
        (
            SGDConfig,
            {"lr": 0.5},
            {**BASE, "lr": 0.5, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False},
        ),
        (LionConfig, {}, {**BASE, "lr": 1e-4, "weight_decay": 1.0, "betas": (0.9, 0.99)}),
        (
            MuonConfig,
            {},
            {
                **BASE, "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5,
                "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "adjust_lr": "original",
                "adamw": {"match": None, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8},
            },
        ),
        (
            ScheduleFreeConfig,
            {},
            {**BASE, "lr": 2.5e-3, "state_dtype": "float32", "betas": (0.9, 0.999), "eps": 1e-8, "weight_power": 2.0},
        ),
        (TorchConfig, {"target": "a.B"}, {**BASE, "target": "a.B", "arguments": {}}),
        (CosineConfig, {}, {"warmup_steps": 0, "warmup_fraction": None, "min_factor": 0.1}),
        (LinearConfig, {}, {"warmup_steps": 0, "warmup_fraction": None, "min_factor": 0.0}),
        (
            WarmupStableDecayConfig,
            {},
            {
                "warmup_steps": 0, "warmup_fraction": None, "decay_steps": None, "decay_fraction": None,
                "curve": "linear", "min_factor": 0.0,
            },
        ),
        (InverseSqrtConfig, {}, {"warmup_steps": 1000}),
        (
            Phase,
            {"to": 1.0},
            {"steps": None, "until": None, "to": 1.0, "curve": "linear", "power": None, "floor": None},
        ),
    ],
)  # fmt: skip
def test_fields_have_their_documented_defaults(
    config: type[BaseModel], given: dict[str, Any], defaults: dict[str, Any]
) -> None:
    found = config.model_validate(given).model_dump()
    assert {name: value for name, value in found.items() if name != "name"} == defaults


@pytest.mark.parametrize(
    ("config", "given", "field", "allowed", "refused"),
    [
        (AdamWConfig, {}, "eps", (1e-30,), (0.0, float("inf"))),
        (AdamWConfig, {}, "betas", ((0.0, 0.999),), ((-0.1, 0.9), (0.9, 1.0))),
        (SGDConfig, {"lr": 0.1}, "momentum", (0.0, 0.99), (-0.1, 1.0)),
        (SGDConfig, {"lr": 0.0}, "lr", (0.0,), (-0.1,)),
        (StochasticAdamWConfig, {}, "seed", (0, 2**63 - 1), (-1, 2**63)),
        (MuonConfig, {}, "ns_steps", (1, 99), (0, 100)),
        (MuonConfig, {}, "lr", (1e-9,), (0.0,)),
        (MuonConfig, {}, "momentum", (0.0,), (1.0,)),
        (ScheduleFreeConfig, {}, "weight_power", (0.0, 10.0), (-0.1, 10.1)),
        (ScheduleFreeConfig, {}, "betas", ((0.5, 0.0),), ((0.0, 0.9), (1.0, 0.9))),
        (CosineConfig, {}, "min_factor", (0.0, 1.0), (-0.1, 1.1)),
        (WarmupStableDecayConfig, {}, "decay_fraction", (1.0,), (0.0, 1.1)),
        (WarmupStableDecayConfig, {}, "decay_steps", (1,), (0,)),
        (InverseSqrtConfig, {}, "warmup_steps", (1,), (0,)),
        (Phase, {"to": 1.0}, "steps", (1,), (0,)),
        (Phase, {"to": 1.0}, "until", (1.0,), (0.0, 1.1)),
        (Phase, {}, "to", (0.0, 1e6), (-0.1, 1.1e6)),
        (Phase, {"to": 1.0, "curve": "poly"}, "power", (100.0,), (0.0, 101.0)),
        (Phase, {"to": 1.0, "curve": "exponential"}, "floor", (1e6,), (0.0, 1.1e6)),
    ],
)  # fmt: skip
def test_numbers_have_limits(
    config: type[BaseModel], given: dict[str, Any], field: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in allowed:
        assert getattr(config.model_validate({**given, field: value}), field) == value
    for value in refused:
        with pytest.raises(ValidationError, match=field):
            config.model_validate({**given, field: value})
