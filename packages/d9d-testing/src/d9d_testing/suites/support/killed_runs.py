"""Run of a tracker in a process that is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d9d_core.tracker import RunInfo

from d9d_testing.suites.support.component import build_component

#: File in the run's directory with the results of ``flush`` and ``state``.
REPORT = "suite-report.json"


def killed_run(address: Sequence[Any], directory: str, steps: Sequence[int]) -> None:
    """Write some steps with a tracker, flush it, report this to the parent process, and kill this process.

    Args:
        address: arguments of :func:`build_component`.
        directory: directory of the run.
        steps: numbers of the steps; the value of each is its number.
    """
    run = build_component(*address).open(
        RunInfo("suite", Path(directory), "a run of the suite", {"steps": 10}, 10, 0), None
    )
    for step in steps:
        run.write(step, {"loss": float(step)})
    flushed = run.flush()
    report = Path(directory) / REPORT
    report.write_text(json.dumps({"flushed": flushed, "state": run.state()}))
    os.kill(os.getpid(), signal.SIGKILL)
