"""Conformance suites of d9d-testing that this package passes; ``d9d plugins conform acme-operations`` runs them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from d9d_core.launcher import LaunchRequest, Submission
from d9d_testing.stand_ins import StandIns
from d9d_testing.suites.launcher import LauncherSuite, Started
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


class TestBackground(LauncherSuite):
    """Launcher ``background``; its script runs with a stand-in for the interpreter."""

    plugin = _PLUGIN
    target = "background"

    def started(self, submission: Submission, request: LaunchRequest, stand_ins: StandIns) -> Started:
        """Processes that the script starts."""
        subprocess.run(submission.command, check=True)  # noqa: S603 - our own script
        (call,) = stand_ins.calls("python")
        stand_ins.forget()
        processes = int(call[call.index("--nproc") + 1])
        return Started(processes=processes, arguments=call, job=request.job_file.read_text("utf-8"))

    def unknown(self, stand_ins: StandIns) -> str:  # noqa: ARG002 - the launcher has no commands
        """Number above the numbers of processes."""
        return "2000000000"
