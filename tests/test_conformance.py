"""d9d's own plugins conform by the command that third parties use, with the suites of their tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from d9d_core.registry.loader import discover
from d9d_testing.conformance.run import conform

PLUGINS = Path(__file__).parents[1] / "plugins"


@pytest.mark.full
@pytest.mark.parametrize("name", ["d9d-optim", "d9d-metrics"])
def test_a_plugin_of_d9d_conforms(name: str) -> None:
    tests = PLUGINS / name / "tests"
    outcome = conform(discover(), name, [tests / "test_plugin.py", tests / "test_suites.py"])
    assert outcome.passed, [row for row in outcome.rows if row.problem]
    assert outcome.count("passed") > 100
