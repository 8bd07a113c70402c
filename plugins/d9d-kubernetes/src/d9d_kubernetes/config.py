"""Config of the launcher ``kubernetes``."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

#: Name of an object: RFC 1123, as Kubernetes requires it.
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
#: Value of a label, or part of a name of a resource.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,251}[A-Za-z0-9])?$")]
#: Environment variable.
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_SECRET_KEY = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9._-]+")
#: Names of environment variables that Kubernetes' controllers or d9d's launcher set.
_RESERVED = re.compile(r"PET_.*|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|JOB_COMPLETION_INDEX|PATH")


def _secret_key(text: str) -> str:
    if _SECRET_KEY.fullmatch(text) is None:
        raise ValueError("write SECRET/KEY, the names of a secret of the namespace and of one of its keys")
    return text


def _not_reserved(name: str) -> str:
    if _RESERVED.fullmatch(name):
        raise ValueError(f"{name} is set by the launcher; choose another variable")
    return name


#: Name of a secret and one of its keys.
SecretKey = Annotated[str, AfterValidator(_secret_key)]


class KubernetesConfig(PluginConfig):
    """Launcher of jobs on Kubernetes, with one pod per machine: image, volume and resources of the pods."""

    name: Literal["kubernetes"] = "kubernetes"
    """Selects this launcher."""
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
    """Image with d9d, the plugins of the job and its data, or with access to the data."""
    claim: Label
    """PersistentVolumeClaim, readable and writable by all pods, that holds the runs."""
    mount: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")] = "/runs"
    """Path of the volume in the pods; it replaces ``run.dir`` of the job."""
    kind: Literal["trainjob", "jobset"] = "trainjob"
    """Object to create: a TrainJob of Kubeflow Trainer v2, or a JobSet, which needs no Kubeflow."""
    runtime: Label = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob, which must have one replicated job, named ``node``."""
    namespace: Label | None = None
    """Namespace; ``null``: the namespace of kubectl's context."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs per pod; ``null``: one for each process, and none for a job with ``device: cpu``."""
    gpu_resource: Word = "nvidia.com/gpu"
    """Kubernetes resource by which GPUs are requested."""
    cpus: PositiveFloat | None = None
    """CPU cores per pod; ``null``: not requested."""
    memory_gib: PositiveFloat | None = None
    """Memory per pod in GiB; ``null``: not requested."""
    queue: Word | None = None
    """Kueue queue that admits the job; ``null``: none."""
    secrets: dict[Annotated[Variable, AfterValidator(_not_reserved)], SecretKey] = {}
    """Environment variables of the processes, such as tokens: variable -> ``SECRET/KEY`` in the namespace."""
    node_selector: dict[Word, Word] = {}
    """Labels that the machines must have."""
    python: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]+$")] = "python3"
    """Python interpreter of the image."""
    grace: PositiveInt = 120
    """Seconds that evicted pods have to save; must be longer than a save takes."""
    restarts: NonNegativeInt = 10
    """Largest number of restarts after a crash, a lost machine or an eviction; a TrainJob has its runtime's limit."""
