"""Declaration of the launcher ``ray``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import LauncherSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_launchers() -> Iterator[LauncherSpec]:
    """Declare the launcher ``ray``, which ``d9d launch --engine ray`` selects."""
    yield LauncherSpec(
        name="ray",
        summary="Ray Train with one worker per rank, on a cluster or on this machine.",
        config=Ref("d9d_ray.config:RayConfig"),
        build=Ref("d9d_ray.launcher:RayLauncher"),
    )
