"""Declaration of the launcher ``skypilot``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import LauncherSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_launchers() -> Iterator[LauncherSpec]:
    """Declare the launcher ``skypilot``, which ``d9d launch --engine skypilot`` selects."""
    yield LauncherSpec(
        name="skypilot",
        summary="Managed jobs of SkyPilot, which continue after a preemption, on any cloud.",
        config=Ref("d9d_skypilot.config:SkyPilotConfig"),
        build=Ref("d9d_skypilot.launcher:SkyPilotLauncher"),
    )
