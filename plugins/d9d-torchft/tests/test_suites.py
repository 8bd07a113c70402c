"""The strategy in the suite of strategies, with one replica: its steps are the steps of any other job."""

from __future__ import annotations

from pathlib import Path

import pytest
from d9d_testing.suites.strategy import StrategySuite


@pytest.mark.thorough
class TestTorchFT(StrategySuite):
    plugin = str(Path(__file__).with_name("alone_plugin.py"))
    target = "alone"
