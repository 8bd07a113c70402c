"""Costs of optimizers agree with the state that they make."""

from __future__ import annotations

from typing import Any

import d9d_optim.plugin as plugin
import pytest
import torch
from d9d_core.plugin import OptimizerSpec
from torch import nn

SPECS = {spec.name: spec for spec in plugin.d9d_optimizers() if spec.cost is not None}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SPECS),
    ("adamw", {"amsgrad": True}),
    ("adamw", {"state_dtype": "float32"}),
    ("sgd", {"momentum": 0.9}),
]


@pytest.mark.parametrize(("name", "fields"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_is_as_large_as_described(name: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    spec: OptimizerSpec = SPECS[name]
    if name == "stochastic_adamw" and dtype == torch.float32:
        dtype = torch.bfloat16  # the only one that it trains
    assert spec.cost is not None
    config = spec.config.load()(**{"lr": 0.1, **fields})
    weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    optimizer = spec.build.load()(config, {"weight": weight})
    optimizer.init_state()
    state = sum(tensor.nbytes for tensor in optimizer.state().values() if tensor.shape == weight.shape)
    cost = spec.cost.load()(config, dtype.itemsize)
    assert state == cost.state * weight.numel()
    assert cost.traffic == 3 * dtype.itemsize + 2 * cost.state
