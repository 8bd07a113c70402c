"""Config of the launcher ``slurm``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from d9d_core.config import PluginConfig
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator


def _of_one_line(line: str) -> str:
    if "\n" in line or "\r" in line or "\0" in line:
        raise ValueError("an entry is one line of shell; write several entries")
    return line


#: Name, or several names separated by commas: text that cannot end an option in a line of #SBATCH.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,@+-]*$")]
#: Constraint on nodes, in Slurm's syntax: names of features, combined with ``&``, ``|``, counts and brackets.
Constraint = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,&|*()\[\]-]+$")]


class SlurmConfig(PluginConfig):
    """Launcher of batch jobs on Slurm: resources of the job, and when it saves and restarts."""

    name: Literal["slurm"] = "slurm"
    """Selects this launcher."""
    partition: Word | None = None
    """Partition, or several separated by commas, of which Slurm takes the first that can start the job; ``null``:
    Slurm's default."""
    constraint: Constraint | None = None
    """Features that nodes must have: ``a100&ib``, or ``[a100|h100]`` so that all nodes have the same one of the two."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    reservation: Word | None = None
    """Reservation of nodes."""
    minutes: PositiveInt | None = None
    """Time limit in minutes; the job saves before it, and starts again. ``null``: the partition's limit."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs per machine; ``null``: one for each process, and none for a job with ``device: cpu``."""
    cpus_per_task: PositiveInt | None = None
    """CPU cores of each process, and its ``OMP_NUM_THREADS``; ``null``: Slurm's default number of cores, one thread."""
    memory_gib: NonNegativeInt | None = None
    """Memory per machine in GiB; 0: all of it; ``null``: Slurm's default."""
    exclusive: bool = False
    """Keep other jobs off the machines."""
    grace: Annotated[int, Field(ge=1, le=65_535)] = 120
    """Seconds before the time limit at which ranks are asked to save and stop; Slurm may ask a minute earlier."""
    restarts: NonNegativeInt = 10
    """Largest number of restarts, whether after a crash, a stop, a lost machine or a preemption."""
    setup: list[Annotated[str, AfterValidator(_of_one_line)]] = []
    """Lines of shell before the training, such as ``module load cuda``. They are stored in a readable file, so write no
    secrets in them."""
    export: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = []
    """Names of environment variables of ``d9d launch submit`` that the job gets; Slurm transfers them, in no file."""

    @model_validator(mode="after")
    def _saves_after_it_has_begun(self) -> Self:
        if self.minutes is not None and self.grace >= 60 * self.minutes:
            raise ValueError(
                f"grace: {self.grace} s before a time limit of {self.minutes} min is before the job begins; lower "
                "grace, or raise minutes"
            )
        return self
