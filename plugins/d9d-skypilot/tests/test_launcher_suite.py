"""The launcher ``skypilot`` passes the suite of launchers; the script of its machines runs with a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import yaml
from d9d_core.launcher import LaunchRequest, Submission
from d9d_testing.stand_ins import StandIns
from d9d_testing.suites.launcher import LauncherSuite, Started


class TestSkyPilot(LauncherSuite):
    plugin = "d9d_skypilot.plugin"
    target = "skypilot"
    config = {"volume": "team-runs", "gpu": "H100", "python": "python", "setup": ["pip install d9d-all"]}
    commands = ("sky",)
    exports = {"secrets": ["D9D_SECRET"]}

    def started(self, submission: Submission, request: LaunchRequest, stand_ins: StandIns) -> Started:
        (text,) = submission.files.values()
        task = yaml.safe_load(text)
        assert submission.command[-1] == str(next(iter(submission.files)))
        home = stand_ins.folder / "home"
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NODE_IPS": "a\nb",
        }
        subprocess.run(["bash", "-c", task["run"]], env=environ, check=True)
        ((_, *arguments),) = stand_ins.calls("python")
        stand_ins.forget()
        processes = task["num_nodes"] * int(arguments[arguments.index("--nproc") + 1])
        job = (home / ".d9d" / "job.yaml").read_text("utf-8")
        return Started(processes=processes, arguments=arguments, job=job)

    def unknown(self, stand_ins: StandIns) -> str:
        stand_ins.answer("sky", "jobs", "queue", text="[]")
        return "d9d-mine-1128120005"

    def accepts(self, stand_ins: StandIns) -> None:
        # The queue has whatever name the submission got.
        program = Path(stand_ins.folder / "sky")
        record = json.dumps([{"job_name": "NAME", "status": "RUNNING"}])
        program.write_text(
            '#!/bin/sh\nhere=$(dirname "$0")\n'
            'if [ "$2" = launch ]; then for file; do :; done; sed -n "s/^name: //p" "$file" > "$here/name"; fi\n'
            f'if [ "$2" = queue ]; then echo \'{record}\' | sed "s/NAME/$(cat "$here/name")/"; fi\n'
        )
