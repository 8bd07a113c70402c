"""The launcher ``kubernetes``: objects that the models of Kubeflow accept, and calls of kubectl."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core.errors import LaunchError
from d9d_core.launcher import LaunchRequest
from d9d_kubernetes.config import KubernetesConfig
from d9d_kubernetes.launcher import KubernetesLauncher
from d9d_kubernetes.manifest import object_name
from pydantic import ValidationError

NOON = datetime(2026, 11, 28, 12, 0, 5, tzinfo=UTC)
FIELDS: dict[str, Any] = {"image": "registry.example.org/team/d9d:1", "claim": "runs"}


KUBECTL = """#!{python}
import json, sys
from pathlib import Path
here = Path({here!r})
with (here / "calls").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
for words, (status, text) in json.loads((here / "answers").read_text()).items():
    if " ".join(sys.argv[1:]).startswith(words):
        print(text, file=sys.stderr if status else sys.stdout)
        sys.exit(status)
"""


class Kubectl:
    """Kubectl that gives prepared answers.

    Args:
        here: directory of its files.
    """

    def __init__(self, here: Path) -> None:
        self.here = here
        self.answers({})

    def answers(self, answers: Mapping[str, tuple[int, str]]) -> None:
        """Set the exit status and the text of commands that begin with given words."""
        (self.here / "answers").write_text(json.dumps(answers))

    def calls(self) -> list[list[str]]:
        """Arguments of all calls."""
        file = self.here / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    here = tmp_path / "kubectl"
    here.mkdir()
    program = here / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable, here=str(here)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    return Kubectl(here)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "My.run_1") -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(
            f"run: {{name: {name}, dir: {tmp_path / 'runs'}}}\n"
            "steps: 2\nbatch: {size: 8}\ntask: causal_lm\noptimizer: {name: adamw, lr: 1.0e-3}\n"
            "model: {name: qwen3, vocab_size: 512, hidden_size: 32, num_layers: 1, num_attention_heads: 2, "
            "num_key_value_heads: 1, head_dim: 16, intermediate_size: 64, max_positions: 32}\n"
            "data: {name: certificate_tokens, vocab_size: 512, sequence_length: 32}\n"
        )
        return path

    return write


def launcher(**fields: Any) -> KubernetesLauncher:
    return KubernetesLauncher(KubernetesConfig(**FIELDS | fields), lambda: NOON)


def request(nodes: int = 2, processes: int = 4, name: str = "mine", options: tuple[str, ...] = ()) -> LaunchRequest:
    folder = Path("/shared/my runs/mine/launch")
    command = ("/usr/bin/python", "-m", "d9d_core", "train", str(folder / "job.yaml"), *options)
    return LaunchRequest(
        name=name,
        command=command,
        job="run:\n  name: mine\nsteps: 5\n",
        job_file=folder / "job.yaml",
        folder=folder,
        working_directory=Path("/home/someone"),
        nodes=nodes,
        processes=processes,
    )


def objects(wanted: LaunchRequest | None = None, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap and job of a submission."""
    (text,) = launcher(**fields).prepare(wanted or request()).files.values()
    config_map, job = yaml.safe_load_all(text)
    return config_map, job


def test_the_job_file_is_readable_in_the_objects() -> None:
    wanted = request()
    (text,) = launcher().prepare(wanted).files.values()
    assert wanted.job.count("\n") > 1
    assert all(f"\n    {line}\n" in text for line in wanted.job.splitlines() if line)


def validated(kind: str, values: Mapping[str, Any]) -> None:
    """Compare values with the model of their kind, which drops unknown fields: a round trip must lose nothing."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    model = {"TrainJob": models.TrainerV1alpha1TrainJob, "JobSet": models.JobsetV1alpha2JobSet}[kind]
    found = model.from_dict(values)
    assert found is not None
    assert found.to_dict() == values


def pod_of(job: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Pod, command and resources of a TrainJob or JobSet."""
    if job["kind"] == "TrainJob":
        trainer = job["spec"]["trainer"]
        node = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        return node["template"]["spec"]["template"]["spec"], trainer["command"], trainer.get("resourcesPerNode", {})
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod, pod["containers"][0]["command"], pod["containers"][0].get("resources", {})


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_objects_are_valid_and_complete(kind: str, nodes: int) -> None:
    fields = {
        "namespace": "team", "queue": "gpu", "secrets": {"HF_TOKEN": "hub/token"}, "cpus": 8, "memory_gib": 64.5,
        "node_selector": {"gpu": "h200"}, "grace": 300, "mount": "/data/runs",
    }  # fmt: skip
    config_map, job = objects(request(nodes=nodes), kind=kind, **fields)
    validated(job["kind"], job)
    assert "nodeSelector" not in pod_of(objects(request(nodes=nodes), kind=kind)[1])[0]
    assert config_map["data"] == {"job.yaml": "run:\n  name: mine\nsteps: 5\n"}
    assert config_map["metadata"]["name"] == job["metadata"]["name"] == "mine-1128120005"
    assert config_map["metadata"]["namespace"] == job["metadata"]["namespace"] == "team"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert "kueue.x-k8s.io/queue-name" not in config_map["metadata"]["labels"]
    pod, command, resources = pod_of(job)
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert resources["limits"] == {"nvidia.com/gpu": "4", "cpu": "8", "memory": "64.5Gi"}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"d9d-job": "/etc/d9d", "d9d-runs": "/data/runs", "d9d-shared-memory": "/dev/shm"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert command[:2] == ["/bin/sh", "-c"]
    words = shlex.split(command[2])
    assert words[:8] == [
        "exec", "python3", "-m", "d9d_core", "train", "/etc/d9d/job.yaml", "--set", "run.dir=/data/runs",
    ]  # fmt: skip
    place = {
        "trainjob": ["$PET_NODE_RANK", "--master", "$PET_MASTER_ADDR:$PET_MASTER_PORT"],
        "jobset": ["$JOB_COMPLETION_INDEX", "--master", "mine-1128120005-node-0-0.mine-1128120005:29500"],
    }[kind]
    several = ["--nodes", "2", "--node-rank", *place]
    assert words[8:] == ["--nproc", "4", *(several if nodes == 2 else ["--alone"])]
    container = job["spec"]["trainer"] if kind == "trainjob" else pod["containers"][0]
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert container["env"] == [{"name": "HF_TOKEN", "valueFrom": secret}]


def test_a_jobset_starts_all_pods_again_except_after_an_error_in_the_job() -> None:
    _, job = objects(kind="jobset", restarts=3)
    policy = job["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    assert policy["rules"][0] | {"name": ""} == {
        "name": "", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"],
    }  # fmt: skip
    inner = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["backoffLimit"] == 0
    assert inner["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert (inner["completions"], inner["parallelism"], inner["completionMode"]) == (2, 2, "Indexed")


def test_gpus_follow_the_device_and_can_be_given() -> None:
    assert pod_of(objects(replace(request(), device="cpu"))[1])[2] == {}
    assert pod_of(objects(gpus_per_node=1, gpu_resource="amd.com/gpu")[1])[2]["requests"] == {"amd.com/gpu": "1"}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("My.run_1", "my-run-1-x"),
        ("---", "d9d-x"),
        ("a" * 200, "a" * 38 + "-x"),
        ("; rm -rf / $(reboot)", "rm-rf-reboot-x"),
        ("Ünï", "n-x"),
    ],
)
def test_names_of_objects_are_valid_whatever_the_run_is_called(run: str, name: str) -> None:
    assert object_name(run, "x") == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image", "a b"), ("image", '"; reboot'), ("claim", "Runs"), ("mount", "runs"), ("mount", "/runs; reboot"),
        ("namespace", "a/b"), ("queue", "a\nb"), ("secrets", {"A B": "s/k"}), ("secrets", {"A": "s"}),
        ("secrets", {"RANK": "s/k"}), ("secrets", {"PET_NNODES": "s/k"}), ("secrets", {"MASTER_ADDR": "s/k"}),
        ("python", "python3 -c"), ("node_selector", {"a b": "c"}), ("kind", "job"),
    ],
)  # fmt: skip
def test_fields_that_could_change_a_command_or_an_object_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        KubernetesConfig(**FIELDS | {field: value})


def test_the_options_of_the_readme_are_valid() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"^```yml[^\n]*\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert KubernetesConfig(**yaml.safe_load(block)).claim == "runs"


def test_what_pods_cannot_have_is_refused() -> None:
    with pytest.raises(LaunchError, match="--plugin"):
        objects(request(options=("--plugin", "/home/someone/mine.py")))
    with pytest.raises(LaunchError, match="1,000,001 bytes"):
        objects(replace(request(), job="x" * 1_000_001))


def test_a_missing_kubectl_or_kind_is_told_with_its_remedy(kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl.answers({"api-resources": (0, "trainjobs.trainer.kubeflow.org")})
    launcher().require()
    with pytest.raises(LaunchError, match=r"no jobsets\.jobset\.x-k8s\.io.*--option kind=trainjob"):
        launcher(kind="jobset").require()
    kubectl.answers({"api-resources": (1, "connection refused")})
    with pytest.raises(LaunchError, match="cannot be asked: kubectl api-resources: connection refused; choose a"):
        launcher().require()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="kubectl not found"):
        launcher().require()


def answer(**status: Any) -> dict[str, tuple[int, str]]:
    return {"get": (0, json.dumps({"status": status})), "logs": (0, "step 1\nstep 2\nstep 3")}


def condition(kind: str, value: str = "True", **more: str) -> dict[str, str]:
    return {"type": kind, "status": value, **more}


@pytest.mark.parametrize(
    ("status", "state", "detail"),
    [
        ({}, "waiting", "no pod runs yet"),
        ({"conditions": [condition("Suspended", reason="Queued")]}, "waiting", "Suspended: Queued"),
        ({"jobsStatus": [{"name": "node", "active": 0}, {"name": "node"}, "odd"]}, "waiting", "no pod runs yet"),
        ({"jobsStatus": [{"name": "node", "active": 1}]}, "running", "active"),
        ({"replicatedJobsStatus": [{"name": "node", "active": 2}], "restarts": 3}, "running", "active, restarts: 3"),
        ({"conditions": [condition("Complete")]}, "finished", "Complete"),
        ({"conditions": [condition("Completed"), condition("Suspended", "False")]}, "finished", "Completed"),
        (
            {"conditions": [condition("Failed", reason="PodFailurePolicy", message="exit code 2")]},
            "failed",
            "Failed: PodFailurePolicy: exit code 2",
        ),
    ],
)
def test_the_state_of_an_object_is_told_with_the_log_of_its_first_pod(
    kubectl: Kubectl, status: dict[str, Any], state: str, detail: str
) -> None:
    kubectl.answers(answer(**status))
    found = launcher().status("trainjob/team/mine-1", Path("unused"), 2)
    assert (found.state, found.detail, found.log) == (state, detail, ("step 2", "step 3"))
    get, *_, logs = kubectl.calls()
    assert get == ["get", "trainjobs.trainer.kubeflow.org", "mine-1", "--namespace=team", "--output=json"]
    assert "jobset.sigs.k8s.io/jobset-name=mine-1" in logs[1]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo noise; echo the cause >&2", "the cause"),
        ("echo the cause", "the cause"),
        ("echo >&2", "exit status 3"),
    ],
)
def test_a_command_that_fails_is_told_by_its_errors_or_else_by_its_output_or_its_status(
    kubectl: Kubectl, script: str, said: str
) -> None:
    (kubectl.here / "kubectl").write_text(f"#!/bin/sh\n{script}\nexit 3\n")
    with pytest.raises(LaunchError, match=rf"^kubectl delete: {said}$"):
        launcher().cancel("trainjob/team/mine-1")


def pods_that_ended(**statuses: int) -> str:
    items = [
        {
            "metadata": {"name": name},
            "status": {
                "containerStatuses": [
                    {"name": "node", "state": {"terminated": {"exitCode": code, "reason": "OOMKilled" * (code == 137)}}}
                ]
            },
        }
        for name, code in statuses.items()
    ]
    running = {"metadata": {"name": "z"}, "status": {"containerStatuses": [{"name": "node", "state": {"running": {}}}]}}
    return json.dumps({"items": [*items, {"metadata": {"name": "y"}, "status": {}}, running]})


@pytest.mark.parametrize(
    ("statuses", "pod", "status", "detail"),
    [
        ({"a": 1, "b": 2, "c": 137}, "b", 2, "Failed; b ended with exit status 2"),
        ({"a": 143, "b": 1}, "b", 1, "Failed; b ended with exit status 1"),
        ({"a": 137, "b": 0}, "a", 137, "Failed; a ended with exit status 137 (OOMKilled)"),
        ({"a": 75, "b": 75}, "a", 75, "Failed; a ended with exit status 75"),
    ],
)
def test_a_failed_job_has_the_exit_status_and_the_log_of_the_pod_that_failed(
    kubectl: Kubectl, statuses: dict[str, int], pod: str, status: int, detail: str
) -> None:
    kubectl.answers({"get pods": (0, pods_that_ended(**statuses)), **answer(conditions=[condition("Failed")])})
    found = launcher().status("jobset/team/mine-1", Path("unused"), 2)
    assert (found.state, found.exit_status, found.detail) == ("failed", status, detail)
    assert kubectl.calls()[-1][:2] == ["logs", pod]


@pytest.mark.parametrize("pods", [(1, "gone"), (0, '{"items": []}'), (0, "[]"), (0, "no JSON")])
def test_without_pods_the_exit_status_is_unknown(kubectl: Kubectl, pods: tuple[int, str]) -> None:
    kubectl.answers({"get pods": pods, **answer(conditions=[condition("Failed")])})
    found = launcher().status("jobset/team/mine-1", Path("unused"), 2)
    assert (found.exit_status, found.detail) == (None, "Failed")


def test_an_object_that_is_gone_is_unknown_and_no_answer_is_an_error(kubectl: Kubectl) -> None:
    kubectl.answers({"get": (1, 'Error from server (NotFound): trainjobs "mine-1" not found')})
    assert launcher().status("trainjob//mine-1", Path("unused"), 5).state == "unknown"
    kubectl.answers({"get": (1, "Unable to connect to the server")})
    with pytest.raises(LaunchError, match="Unable to connect"):
        launcher().status("trainjob//mine-1", Path("unused"), 5)
    kubectl.answers({"get": (0, "no JSON")})
    with pytest.raises(LaunchError, match="not JSON"):
        launcher().status("trainjob//mine-1", Path("unused"), 5)


@pytest.mark.parametrize("text", ["mine", "trainjob/team", "trainjob/a/--all", "pod/a/b", "trainjob/a/b c", ""])
def test_malformed_identifiers_reach_no_command(kubectl: Kubectl, text: str) -> None:
    for call in (lambda one: one.cancel(text), lambda one: one.status(text, Path("unused"), 1)):
        with pytest.raises(LaunchError, match="not KIND/NAMESPACE/NAME"):
            call(launcher())
    assert kubectl.calls() == []


def test_a_cancelled_job_is_deleted_with_its_job_file(kubectl: Kubectl) -> None:
    launcher().cancel("jobset/team/mine-1")
    assert kubectl.calls() == [
        ["delete", "jobsets.jobset.x-k8s.io", "mine-1", "--namespace=team", "--wait=false"],
        ["delete", "configmap", "mine-1", "--namespace=team", "--wait=false", "--ignore-not-found"],
    ]


@pytest.mark.thorough
def test_a_job_is_submitted_followed_and_cancelled_by_the_command_line(
    kubectl: Kubectl, job: Callable[..., Path], tmp_path: Path
) -> None:
    kubectl.answers(
        {
            "api-resources": (0, "trainjobs.trainer.kubeflow.org"),
            "create": (0, "configmap/my-run-1-1\ntrainjob.trainer.kubeflow.org/my-run-1-1"),
            **answer(jobsStatus=[{"name": "node", "active": 2}]),
        }
    )
    path = str(job())
    options = ["--engine", "kubernetes", "--nodes", "2", "--processes", "4"]
    given = [word for name, value in FIELDS.items() for word in ("--option", f"{name}={value}")]
    dry = d9d("launch", "submit", path, *options, *given, "--dry-run")
    assert "kind: TrainJob" in dry.stdout
    assert kubectl.calls() == []
    done = d9d("launch", "submit", path, *options, *given)
    assert "submitted to kubernetes as trainjob//my-run-1-1" in done.stdout
    folder = tmp_path / "runs" / "My.run_1" / "launch"
    config_map, _ = yaml.safe_load_all((folder / "kubernetes.yaml").read_text())
    resolved = yaml.safe_load(config_map["data"]["job.yaml"])
    assert resolved["mesh"]["dp_shard"] == 8
    assert [tracker["name"] for tracker in resolved["trackers"]] == ["console", "jsonl"]  # the defaults of training
    assert "kubernetes trainjob//my-run-1-1: running" in d9d("launch", "status", path).stdout
    again = d9d("launch", "submit", path, *options, *given, status=2)
    assert "was submitted to kubernetes as trainjob//my-run-1-1, which is running" in again.stderr
    d9d("launch", "cancel", path)
    assert kubectl.calls()[-2][:2] == ["delete", "trainjobs.trainer.kubeflow.org"]


def d9d(*words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "d9d_core", *words], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.full
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_the_commands_of_two_pods_train_one_job(job: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """The pods' own shell commands run here, with the variables that the controllers set."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    wanted = request(processes=1)
    _, found = objects(wanted, kind=kind, mount=str(tmp_path / "volume"), python=sys.executable)
    text = pod_of(found)[1][2].replace("/etc/d9d/job.yaml", shlex.quote(str(job())))
    text = text.replace("mine-1128120005-node-0-0.mine-1128120005:29500", f"127.0.0.1:{port}")
    pods = []
    for index in ("0", "1"):
        place = {"PET_NODE_RANK": index, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NNODES": "2"}
        place |= {"JOB_COMPLETION_INDEX": index, "GLOO_SOCKET_IFNAME": "lo"}
        pods.append(subprocess.Popen(["/bin/sh", "-c", text], env={**os.environ, **place}, cwd=tmp_path))
    assert [pod.wait(timeout=120) for pod in pods] == [0, 0]
    assert json.loads((tmp_path / "volume" / "My.run_1" / "finished.json").read_text())["step"] == 2
