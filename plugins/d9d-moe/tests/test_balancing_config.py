"""Numbers of balancing in a job file."""

from __future__ import annotations

import math
from typing import Any

import pytest
from d9d_core.config import Section
from d9d_moe.balancing.config import AuxiliaryLossConfig, Balancing, BalancingConfig, BiasUpdateConfig, ZLossConfig
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


class Model(Section):
    """Stands for the config of a model."""

    balancing: tuple[Balancing, ...] = ()
    """The field."""


def problem(chosen: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Model.model_validate({"balancing": [chosen]})
    (error,) = caught.value.errors()
    return str(error["msg"])


def test_a_bare_name_takes_the_defaults_and_a_config_stays() -> None:
    ready = AuxiliaryLossConfig(coefficient=0.5)
    assert Model.model_validate({"balancing": ["z_loss", "bias_update", ready]}).balancing == (
        ZLossConfig(coefficient=1e-3), BiasUpdateConfig(rate=1e-3), ready,
    )  # fmt: skip
    assert ready.scope == "sequence"


def test_names_that_are_none_are_refused_with_the_known_ones() -> None:
    known = "there are: auxiliary_loss, z_loss, bias_update"
    assert problem("z_los") == f"Value error, unknown balancing method 'z_los'; did you mean 'z_loss'? {known}"
    assert problem({"name": "xyz"}) == f"Value error, unknown balancing method 'xyz'; {known}"
    expected = "Value error, expected the name of a balancing method, or a mapping with 'name', not"
    assert problem(3) == f"{expected} 3"
    assert problem({"rate": 1}) == f"{expected} {{'rate': 1}}"
    assert problem({"name": 3}) == f"{expected} {{'name': 3}}"
