"""Declaration of the launcher ``kubernetes``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import LauncherSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_launchers() -> Iterator[LauncherSpec]:
    """Declare the launcher ``kubernetes``, which ``d9d launch --engine kubernetes`` selects."""
    yield LauncherSpec(
        name="kubernetes",
        summary="A TrainJob of Kubeflow or a JobSet, whose pods save when they are evicted, and restart.",
        config=Ref("d9d_kubernetes.config:KubernetesConfig"),
        build=Ref("d9d_kubernetes.launcher:KubernetesLauncher"),
    )
