"""Declaration of the launcher ``slurm``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import LauncherSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_launchers() -> Iterator[LauncherSpec]:
    """Declare the launcher ``slurm``, which ``d9d launch --engine slurm`` selects."""
    yield LauncherSpec(
        name="slurm",
        summary="Batch jobs of Slurm, which save before the time limit and restart.",
        config=Ref("d9d_slurm.config:SlurmConfig"),
        build=Ref("d9d_slurm.launcher:SlurmLauncher"),
    )
