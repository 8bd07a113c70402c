"""The launcher ``ray`` passes the suite of launchers, with a driver on this machine and with a job server."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from d9d_core.launcher import LaunchRequest, Submission
from d9d_ray.order import Order
from d9d_testing.stand_ins import StandIns
from d9d_testing.suites.launcher import LauncherSuite, Started


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's shell may name a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


class RaySuite(LauncherSuite):
    plugin = "d9d_ray.plugin"
    target = "ray"
    commands = ("ray",)

    def started(self, submission: Submission, request: LaunchRequest, stand_ins: StandIns) -> Started:
        self.run(submission.command)
        ((_, *driver),) = stand_ins.calls("python")
        stand_ins.forget()
        assert driver[:2] == ["-m", "d9d_ray.driver"]
        order = Order.read(driver[2])
        return Started(processes=order.processes, arguments=order.options, job=Path(order.job).read_text("utf-8"))

    def run(self, command: tuple[str, ...]) -> None:
        """Run the driver's command as the engine does."""
        raise NotImplementedError


class TestDriver(RaySuite):
    exports = {"export": ["D9D_SECRET"]}

    def run(self, command: tuple[str, ...]) -> None:
        subprocess.run(command, check=True)

    def unknown(self, stand_ins: StandIns) -> str:
        ended = subprocess.Popen(["true"])
        ended.wait()
        return f"process/{platform.node()}/{ended.pid}"


class TestJobServer(RaySuite):
    config = {"address": "http://head.example.org:8265"}

    def run(self, command: tuple[str, ...]) -> None:
        # The server gives the words to a shell; releases of Ray quote them differently, so they need no quotes.
        subprocess.run(" ".join(command[command.index("--") + 1 :]), shell=True, check=True)

    def unknown(self, stand_ins: StandIns) -> str:
        stand_ins.answer("ray", "job", text="RuntimeError: Job 'raysubmit_1' does not exist", status=1)
        return "job/raysubmit_1"

    def accepts(self, stand_ins: StandIns) -> None:
        stand_ins.answer("ray", "job", "submit", text="Job 'raysubmit_1' submitted successfully")
        stand_ins.answer("ray", "job", "status", text="Status for job 'raysubmit_1': RUNNING")
