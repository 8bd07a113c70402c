"""Plugin declaration of the tracker ``aim``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, TrackerSpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Declare the tracker ``aim``."""
    yield TrackerSpec(
        name="aim",
        summary="Runs in Aim, on a server or in a local repository.",
        config=Ref("d9d_aim.config:AimConfig"),
        build=Ref("d9d_aim.tracker:AimTracker"),
        requires=frozenset({"import:aim"}),
    )
