"""Objects of a submission: a ConfigMap with the job file, and a TrainJob or a JobSet."""

from __future__ import annotations

import hashlib
import re
import shlex
from typing import Any

import yaml
from d9d_core.errors import LaunchError
from d9d_core.launcher import EXIT_FAILED, LaunchRequest

from d9d_kubernetes.config import KubernetesConfig

#: Directory of the job file in the pods, and port on the first pod at which all ranks meet.
_JOB, _PORT = "/etc/d9d", 29_500
#: Name of the replicated job, as in the runtimes of Kubeflow; its container has the same name.
NODE = "node"
#: Prefix of d9d's annotations: a domain that is reserved for local use.
_OWN = "d9d.local"
#: Largest number of characters of an object's name. Kubernetes appends to it to name pods and hosts, whose names may
#: have 63 characters.
_LONGEST = 40


class _Readable(yaml.SafeDumper):
    """YAML dumper that writes a text of several lines on several lines."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def manifest(config: KubernetesConfig, request: LaunchRequest, name: str) -> str:
    """YAML documents of all objects.

    Args:
        config: image, volume and resources.
        request: job and number of processes.
        name: name of the objects.

    Raises:
        LaunchError: the job needs files of this machine, or a ConfigMap cannot hold it.
    """
    make = _train_job if config.kind == "trainjob" else _job_set
    documents = [_config_map(config, request, name), make(config, request, name)]
    return yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=1000)


def object_name(run: str, suffix: str) -> str:
    """Name of the objects of a submission, valid by RFC 1123; ``suffix`` tells the submissions of a run apart."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[: _LONGEST - len(suffix) - 1].strip("-")
    return f"{plain or 'd9d'}-{suffix}"


def _metadata(config: KubernetesConfig, request: LaunchRequest, name: str) -> dict[str, Any]:
    instance = object_name(request.name, "run").removesuffix("-run")
    labels = {"app.kubernetes.io/name": "d9d", "app.kubernetes.io/instance": instance}
    digest = {f"{_OWN}/job-sha256": hashlib.sha256(request.job.encode()).hexdigest()}
    return {"name": name, **_given(namespace=config.namespace), "labels": labels, "annotations": digest}


def _queued(config: KubernetesConfig, metadata: dict[str, Any]) -> dict[str, Any]:
    if config.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = config.queue
    return metadata


def _config_map(config: KubernetesConfig, request: LaunchRequest, name: str) -> dict[str, Any]:
    if len(request.job.encode()) > 1_000_000:
        raise LaunchError(
            f"the job file has {len(request.job.encode()):,} bytes, and a ConfigMap holds 1 MB; shorten it"
        )
    data = {"job.yaml": request.job}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(config, request, name), "data": data}


def _train_job(config: KubernetesConfig, request: LaunchRequest, name: str) -> dict[str, Any]:
    # Kubeflow's controller sets PET_* for torchrun. d9d's launcher reads them instead, because torchrun would hide the
    # exit statuses.
    place = ("PET_NODE_RANK", "$PET_MASTER_ADDR:$PET_MASTER_PORT")
    container = {"name": NODE, "volumeMounts": _mounts(config)}
    pod = {
        **_given(nodeSelector=config.node_selector or None),
        "terminationGracePeriodSeconds": config.grace,
        "volumes": _volumes(config, name),
        "containers": [container],
    }
    patch = {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _queued(config, _metadata(config, request, name)),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": config.runtime,
            },
            "trainer": {
                "image": config.image,
                "command": _command(config, request, *place),
                "numNodes": request.nodes,
                "numProcPerNode": request.processes,
                **_given(env=_environment(config), resourcesPerNode=_resources(config, request)),
            },
            "runtimePatches": [{"manager": f"{_OWN}/launch", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }  # fmt: skip


def _job_set(config: KubernetesConfig, request: LaunchRequest, name: str) -> dict[str, Any]:
    # Environment variable with the number of the pod; address of the first pod, by the host name from the JobSet.
    place = ("JOB_COMPLETION_INDEX", f"{name}-{NODE}-0-0.{name}:{_PORT}")
    container = {
        "name": NODE,
        "image": config.image,
        "command": _command(config, request, *place),
        **_given(env=_environment(config), resources=_resources(config, request)),
        "volumeMounts": _mounts(config),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.grace,
        **_given(nodeSelector=config.node_selector or None),
        "containers": [container],
        "volumes": _volumes(config, name),
    }
    failed = {"containerName": NODE, "operator": "In", "values": [EXIT_FAILED]}
    job = {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        # All pods must start again together. So one failed pod fails the whole Job, and the JobSet restarts the Job.
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": failed}]},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(config, _metadata(config, request, name)),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {
                "maxRestarts": config.restarts,
                "rules": [
                    {"name": "error-in-the-job", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                ],
            },
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _command(config: KubernetesConfig, request: LaunchRequest, index: str, master: str) -> list[str]:
    """Command of a pod: one launcher of d9d per machine, whose exit status is the pod's.

    Args:
        config: interpreter and path of the volume.
        request: job and number of processes.
        index: name of the environment variable with the number of the pod.
        master: address of the first pod, in which the shell expands variables.
    """
    options = request.command[request.command.index(str(request.job_file)) + 1 :]
    if "--plugin" in options:
        raise LaunchError(
            "--plugin: the pods do not have files of this machine; put the plugin into a package of the image"
        )
    train = [config.python, "-m", "d9d_core", "train", f"{_JOB}/job.yaml", "--set", f"run.dir={config.mount}", *options]
    words = [shlex.join([*train, "--nproc", str(request.processes)])]
    # A single pod also has variables that would mark it as one of several machines; --alone ignores them.
    words += (
        [f'--nodes {request.nodes} --node-rank "${index}" --master "{master}"'] if request.nodes > 1 else ["--alone"]
    )
    return ["/bin/sh", "-c", f"exec {' '.join(words)}"]


def _environment(config: KubernetesConfig) -> list[dict[str, Any]] | None:
    """Environment variables that Kubernetes takes from secrets, so that no file contains their values."""
    found = []
    for variable, place in config.secrets.items():
        secret, _, key = place.partition("/")
        found.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found or None


def _resources(config: KubernetesConfig, request: LaunchRequest) -> dict[str, Any] | None:
    gpus = config.gpus_per_node
    if gpus is None:
        gpus = 0 if request.device == "cpu" else request.processes
    wanted = {
        **({config.gpu_resource: str(gpus)} if gpus else {}),
        **({"cpu": f"{config.cpus:g}"} if config.cpus is not None else {}),
        **({"memory": f"{config.memory_gib:g}Gi"} if config.memory_gib is not None else {}),
    }
    return {"requests": wanted, "limits": dict(wanted)} if wanted else None


def _mounts(config: KubernetesConfig) -> list[dict[str, Any]]:
    return [
        {"name": "d9d-job", "mountPath": _JOB, "readOnly": True},
        {"name": "d9d-runs", "mountPath": config.mount},
        {"name": "d9d-shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - data workers and NCCL need more than 64 MB
    ]


def _volumes(config: KubernetesConfig, name: str) -> list[dict[str, Any]]:
    return [
        {"name": "d9d-job", "configMap": {"name": name}},
        {"name": "d9d-runs", "persistentVolumeClaim": {"claimName": config.claim}},
        {"name": "d9d-shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
