"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

import pytest
from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the library's own dependencies

    plugin = "d9d_aim.plugin"
