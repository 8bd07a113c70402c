"""The launcher ``slurm`` passes the suite of launchers; its script runs with stand-ins for Slurm's commands."""

from __future__ import annotations

import re
import subprocess

from d9d_core.launcher import LaunchRequest, Submission
from d9d_testing.stand_ins import StandIns
from d9d_testing.suites.launcher import LauncherSuite, Started


class TestSlurm(LauncherSuite):
    plugin = "d9d_slurm.plugin"
    target = "slurm"
    commands = ("sbatch", "squeue", "scontrol", "scancel", "srun")
    exports = {"export": ["D9D_SECRET"]}

    def started(self, submission: Submission, request: LaunchRequest, stand_ins: StandIns) -> Started:
        (script,) = submission.files
        log = request.folder / "slurm-7.log"
        log.touch()
        env = {"PATH": f"{stand_ins.folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        ((_, _, *arguments),) = stand_ins.calls("srun")
        stand_ins.forget()
        text = script.read_text()
        nodes, tasks = (int(re.findall(f"^#SBATCH --{name}=(\\d+)$", text, re.MULTILINE)[0]) for name in _SIZES)
        return Started(processes=nodes * tasks, arguments=arguments, job=request.job_file.read_text("utf-8"))

    def unknown(self, stand_ins: StandIns) -> str:
        stand_ins.answer("squeue", text="slurm_load_jobs error: Invalid job id specified", status=1)
        return "4711"

    def accepts(self, stand_ins: StandIns) -> None:
        stand_ins.answer("sbatch", text="4711")
        stand_ins.answer("squeue", text=f"{'PENDING':30}{'0':12}{'':200}{'Priority':100}{'0':12}")


_SIZES = ("nodes", "ntasks-per-node")
