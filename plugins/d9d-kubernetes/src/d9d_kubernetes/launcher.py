"""Launcher ``kubernetes``: kubectl with the user's own context and rights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from d9d_core.errors import LaunchError
from d9d_core.launcher import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EngineStatus,
    LaunchRequest,
    LaunchState,
    Submission,
    answer_of,
)

from d9d_kubernetes.config import KubernetesConfig
from d9d_kubernetes.manifest import NODE, manifest, object_name

#: Seconds within which kubectl must answer.
_PATIENCE = 120
#: Kind of an object -> name for kubectl.
_KINDS = {"trainjob": "trainjobs.trainer.kubeflow.org", "jobset": "jobsets.jobset.x-k8s.io"}
#: Beginning of a log line of kubectl's library, which repeats the error message after it.
_DEBUG = re.compile(r"[EWI]\d{4} \d\d:")
#: An exit status above this means that a signal ended the process.
_SIGNALS = 128
_IDENTIFIER = re.compile(r"(trainjob|jobset)/([a-z0-9-]{0,63})/([a-z0-9][a-z0-9-]{0,62})", re.ASCII)
#: Condition of a TrainJob or a JobSet -> state, in the order in which conditions decide.
_CONDITIONS: tuple[tuple[str, LaunchState], ...] = (
    ("Failed", "failed"),
    ("Complete", "finished"),
    ("Completed", "finished"),
    ("Suspended", "waiting"),
)


class KubernetesLauncher:
    """Submits TrainJobs and JobSets to a cluster. A :class:`~d9d_core.launcher.Launcher`.

    Args:
        config: image, volume and resources.
        now: clock, which tells the names of a run's submissions apart.
    """

    def __init__(self, config: KubernetesConfig, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._config = config
        self._now = now

    def require(self) -> None:
        """Check that kubectl is installed and that the cluster has the kind of object.

        Raises:
            LaunchError: kubectl is not installed, or the cluster does not answer or lacks the kind of object.
        """
        if shutil.which("kubectl") is None:
            raise LaunchError(
                "kubectl not found: install it and choose a context of your cluster, or print the files with --dry-run"
            )
        kind = _KINDS[self._config.kind]
        group = kind.partition(".")[2]
        try:
            known = _run("kubectl", "api-resources", f"--api-group={group}", "--output=name").split()
        except LaunchError as error:
            raise LaunchError(
                f"the cluster cannot be asked: {error}; choose a context that reaches it (kubectl config use-context), "
                "or print the files with --dry-run"
            ) from error
        if kind not in known:
            other = "jobset" if self._config.kind == "trainjob" else "trainjob"
            raise LaunchError(
                f"the cluster has no {kind}; ask its administrator to install "
                f"{'Kubeflow Trainer' if other == 'jobset' else 'JobSet'}, or use --option kind={other}"
            )

    def prepare(self, request: LaunchRequest) -> Submission:
        """Make the objects, and the command that creates them.

        Raises:
            LaunchError: the job needs files of this machine, or a ConfigMap cannot hold it.
        """
        name = object_name(request.name, f"{self._now():%m%d%H%M%S}")
        file = request.folder / "kubernetes.yaml"
        command = ("kubectl", "create", "--output=name", f"--filename={file}")
        return Submission(files={file: manifest(self._config, request, name)}, command=command)

    def submit(self, submission: Submission) -> str:
        """Create the objects; return ``KIND/NAMESPACE/NAME``; NAMESPACE is empty for kubectl's namespace.

        Raises:
            LaunchError: the cluster refused an object.
        """
        output = _run(*submission.command)
        kind = _KINDS[self._config.kind].partition(".")[0].removesuffix("s")
        names = re.findall(rf"^{kind}\.[a-z0-9.-]+/(\S+)$", output, re.MULTILINE)
        if len(names) != 1:
            raise LaunchError(f"kubectl does not say which {kind} it created: {output.strip()[:200]!r}")
        return f"{self._config.kind}/{self._config.namespace or ''}/{names[0]}"

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:  # noqa: ARG002 - Launcher
        """Ask the cluster for the state of a job, and for the last log lines of the failed pod, else of the first pod.

        Raises:
            LaunchError: the identifier is malformed, or the cluster does not answer.
        """
        kind, place, name = _parts(identifier)
        try:
            found = json.loads(_run("kubectl", "get", _KINDS[kind], name, *place, "--output=json"))
        except LaunchError as error:
            if "NotFound" not in str(error):
                raise
            return EngineStatus(state="unknown", detail="the cluster has no such object: it was cancelled or removed")
        except ValueError as error:
            raise LaunchError(f"kubectl get {name}: the answer is not JSON: {error}") from error
        status = found.get("status") or {} if isinstance(found, dict) else {}
        state, detail = _state(status)
        ended = _ended_pods(name, place) if state == "failed" else []
        if cause := _cause(ended):
            reason = f" ({cause.reason})" if cause.reason else ""
            detail += f"; {cause.name} ended with exit status {cause.status}{reason}"
        log = _log(name, place, lines, cause.name if cause else None) if lines else ()
        code = EXIT_FINISHED if state == "finished" else cause.status if cause else None
        return EngineStatus(state=state, detail=detail, log=log, exit_status=code)

    def cancel(self, identifier: str) -> str:
        """Delete the objects; the pods then have their grace period to save.

        Raises:
            LaunchError: the identifier is malformed, or the cluster has no such object.
        """
        kind, place, name = _parts(identifier)
        _run("kubectl", "delete", _KINDS[kind], name, *place, "--wait=false")
        _run("kubectl", "delete", "configmap", name, *place, "--wait=false", "--ignore-not-found")
        return "all ranks finish their step, save and stop; the job is not restarted"


@dataclass(frozen=True)
class _Pod:
    """Pod whose container has ended.

    Attributes:
        name: name of the pod.
        status: exit status of the container.
        reason: Kubernetes' reason for the end, such as ``OOMKilled``; empty for a plain error.
    """

    name: str
    status: int
    reason: str


def _ended_pods(name: str, place: tuple[str, ...]) -> list[_Pod]:
    """Pods of a job whose container has ended; empty if the cluster has removed the pods."""
    selector = f"jobset.sigs.k8s.io/jobset-name={name}"
    try:
        found = json.loads(_run("kubectl", "get", "pods", f"--selector={selector}", *place, "--output=json"))
        pods = []
        for pod in found["items"]:
            for container in pod["status"].get("containerStatuses") or ():
                ended = (container.get("state") or {}).get("terminated")
                if container["name"] == NODE and ended is not None:
                    reason = ended.get("reason") or ""
                    pods.append(
                        _Pod(pod["metadata"]["name"], int(ended["exitCode"]), "" if reason == "Error" else reason)
                    )
    except (LaunchError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return pods


def _cause(pods: Sequence[_Pod]) -> _Pod | None:
    """Pod that most likely failed first: a pod with an error in the job, else a pod not ended by a signal, else any."""
    failed = [pod for pod in pods if pod.status]
    return min(failed, key=lambda pod: (pod.status != EXIT_FAILED, pod.status > _SIGNALS, pod.name), default=None)


def _parts(identifier: str) -> tuple[str, tuple[str, ...], str]:
    """Kind of the object, kubectl's options for the namespace, and name, from the identifier of a job."""
    found = _IDENTIFIER.fullmatch(identifier)
    if found is None:
        raise LaunchError(f"{identifier[:80]!r} is not KIND/NAMESPACE/NAME of a job; look for it with kubectl get")
    return found[1], (f"--namespace={found[2]}",) if found[2] else (), found[3]


def _state(status: Mapping[str, Any]) -> tuple[LaunchState, str]:
    conditions = {
        one.get("type"): one
        for one in status.get("conditions") or ()
        if isinstance(one, dict) and one.get("status") == "True"
    }
    restarts = status.get("restarts")
    more = f", restarts: {restarts}" if isinstance(restarts, int) and restarts else ""
    for name, state in _CONDITIONS:
        if name in conditions:
            reason, message = (str(conditions[name].get(key) or "") for key in ("reason", "message"))
            text = ": ".join(part for part in (name, reason, message) if part)
            return state, text + more
    children = [*(status.get("jobsStatus") or ()), *(status.get("replicatedJobsStatus") or ())]
    active = any(isinstance(one, dict) and (one.get("active") or 0) > 0 for one in children)
    return ("running", f"active{more}") if active else ("waiting", f"no pod runs yet{more}")


def _log(name: str, place: tuple[str, ...], lines: int, pod: str | None) -> tuple[str, ...]:
    """Last log lines of a pod; without ``pod``, of the first pod of the job."""
    first = f"--selector=jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0"
    try:
        text = _run("kubectl", "logs", pod or first, *place, f"--tail={lines}", f"--container={NODE}")
    except LaunchError:  # no pod has started, or it is gone
        return ()
    return tuple(text.splitlines()[-lines:])


def _run(*command: str) -> str:
    """Standard output of kubectl.

    Raises:
        LaunchError: kubectl is missing, failed or did not answer.
    """
    done = answer_of(
        command,
        seconds=_PATIENCE,
        missing="kubectl not found; run this command where kubectl is installed",
        silent=f"kubectl did not answer within {_PATIENCE} s; is the cluster reachable?",
    )
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        told = [line for line in lines if not _DEBUG.match(line)] or lines or [f"exit status {done.returncode}"]
        raise LaunchError(f"kubectl {command[1]}: {'; '.join(told)}")
    return done.stdout
