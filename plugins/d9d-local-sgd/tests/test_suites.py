"""Both strategies in the suite of strategies, which compares mean gradients and steps without meetings."""

from __future__ import annotations

import pytest
from d9d_testing.suites.strategy import StrategySuite


@pytest.mark.thorough
class TestLocalSgd(StrategySuite):
    plugin = "d9d_local_sgd.plugin"
    target = "local_sgd"
    meshes = ({"dp_replicate": 2},)
    settings = ({"period": 2},)


@pytest.mark.full
class TestDiLoCo(TestLocalSgd):
    target = "diloco"
    meshes = ({"dp_replicate": 3},)
    settings = ({"period": 4}, {"period": 1, "outer_momentum": 0.0})
