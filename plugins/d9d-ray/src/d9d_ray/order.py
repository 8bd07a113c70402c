"""Order of a run: the file by which ``d9d launch`` tells Ray's driver and workers what to train. Needs no Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from d9d_core.errors import JobError

#: Files in the folder of a submission: the order, the driver's log, the driver's exit status, and the request to stop.
ORDER, LOG, END, STOP = "ray.json", "ray.log", "ray-end.json", "ray-stop"
#: File that exists while the workers train.
TRAINS = "ray-trains"
#: File in Ray's own checkpoint, with the step and the path of d9d's checkpoint.
POINTER = "d9d-checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class Order:
    """Order of a run.

    Attributes:
        name: name of the run.
        job: absolute path of the job file.
        options: options of ``d9d train`` after the job file.
        folder: folder of the submission, which all machines share.
        working_directory: directory in which the processes work.
        processes: number of processes on all machines together.
        resources: resources that Ray reserves for each process, such as ``{"CPU": 1.0}``.
        restarts: largest number of restarts.
        startup: seconds within which all processes must start.
        address: address of the cluster; ``None``: ``RAY_ADDRESS``, else a new cluster on this machine.
        export: names of environment variables that the processes get from the driver.
    """

    name: str
    job: str
    options: list[str]
    folder: str
    working_directory: str
    processes: int
    resources: dict[str, float]
    restarts: int
    startup: int
    address: str | None
    export: list[str]

    def text(self) -> str:
        """Text of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def values(self) -> Mapping[str, Any]:
        """Fields as JSON values, in which form Ray sends them to the workers."""
        return asdict(self)

    @classmethod
    def read(cls, address: str) -> Order:
        """Read an order.

        Args:
            address: ``file:`` address of the order, in which no character means anything to a shell.

        Raises:
            JobError: the file is missing or damaged.
        """
        file = Path(unquote(urlsplit(address).path))
        try:
            return cls(**json.loads(file.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise JobError(f"{file}: cannot be read: {error}; all machines must share run.dir") from error


def write_values(file: Path, values: Mapping[str, Any]) -> None:
    """Write JSON values atomically: a reader finds the whole file or none."""
    draft = file.with_name(f".{file.name}.tmp")
    draft.write_text(json.dumps(dict(values)) + "\n", "utf-8")
    draft.replace(file)
