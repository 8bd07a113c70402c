"""Conformance suites of d9d-testing that this package passes; ``d9d plugins conform acme-operations`` runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.subscriber import SubscriberSuite

_PLUGIN = "acme_operations.plugin"


class TestPlugin(PluginSuite):
    """Declarations of the package."""

    plugin = _PLUGIN


class TestHeartbeat(SubscriberSuite):
    """Subscriber ``heartbeat``."""

    plugin = _PLUGIN
    target = "heartbeat"

    def files(self, directory: Path) -> Mapping[str, bytes]:
        """Files without the times, which differ between runs."""
        found = super().files(directory)
        return {name: re.sub(rb'"time": [^}]*', b"", content) for name, content in found.items()}
