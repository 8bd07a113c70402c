"""The launcher ``kubernetes`` passes the suite of launchers; the command of its pods runs with a stand-in."""

from __future__ import annotations

import subprocess
from typing import Any

import yaml
from d9d_core.launcher import LaunchRequest, Submission
from d9d_testing.stand_ins import StandIns
from d9d_testing.suites.launcher import LauncherSuite, Started

FIELDS = {"image": "registry.example.org/team/d9d:1", "claim": "runs", "python": "python"}


class KubernetesSuite(LauncherSuite):
    plugin = "d9d_kubernetes.plugin"
    target = "kubernetes"
    commands = ("kubectl",)
    exports = {"secrets": {"D9D_SECRET": "hub/token"}}

    def started(self, submission: Submission, request: LaunchRequest, stand_ins: StandIns) -> Started:
        (text,) = submission.files.values()
        config_map, job = yaml.safe_load_all(text)
        pods, command = self.pods(job["spec"])
        subprocess.run(command, check=True)
        ((_, *arguments),) = stand_ins.calls("python")
        stand_ins.forget()
        processes = pods * int(arguments[arguments.index("--nproc") + 1])
        return Started(processes=processes, arguments=arguments, job=config_map["data"]["job.yaml"])

    def pods(self, spec: dict[str, Any]) -> tuple[int, list[str]]:
        """Number of pods, and their command."""
        raise NotImplementedError

    def unknown(self, stand_ins: StandIns) -> str:
        stand_ins.answer("kubectl", text="Error from server (NotFound): not found", status=1)
        return "trainjob/team/mine-1"

    def accepts(self, stand_ins: StandIns) -> None:
        stand_ins.answer("kubectl", "create", text="trainjob.trainer.kubeflow.org/x-1\njobset.jobset.x-k8s.io/x-1")
        stand_ins.answer("kubectl", "get", text="{}")


class TestTrainJob(KubernetesSuite):
    config = FIELDS

    def pods(self, spec: dict[str, Any]) -> tuple[int, list[str]]:
        return spec["trainer"]["numNodes"], spec["trainer"]["command"]


class TestJobSet(KubernetesSuite):
    config = {**FIELDS, "kind": "jobset"}

    def pods(self, spec: dict[str, Any]) -> tuple[int, list[str]]:
        job = spec["replicatedJobs"][0]["template"]["spec"]
        return job["parallelism"], job["template"]["spec"]["containers"][0]["command"]
