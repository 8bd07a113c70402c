"""Numbers of balancing in a job file."""

from __future__ import annotations

import math

import pytest
from d9d_moe.balancing.config import AuxiliaryLossConfig, BalancingConfig, BiasUpdateConfig, ZLossConfig
from pydantic import ValidationError


@pytest.mark.parametrize("wrong", [0.0, -1e-3, math.inf, math.nan])
@pytest.mark.parametrize(
    ("config", "field"),
    [(AuxiliaryLossConfig, "coefficient"), (ZLossConfig, "coefficient"), (BiasUpdateConfig, "rate")],
)
def test_strengths_are_positive_and_finite(config: type[BalancingConfig], field: str, wrong: float) -> None:
    assert getattr(config.model_validate({field: 0.25}), field) == 0.25
    with pytest.raises(ValidationError, match=field):
        config.model_validate({field: wrong})
