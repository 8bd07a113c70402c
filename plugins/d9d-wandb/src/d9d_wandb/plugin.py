"""Plugin declaration of the tracker ``wandb``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, TrackerSpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Declare the tracker ``wandb``."""
    yield TrackerSpec(
        name="wandb",
        summary="Runs in Weights & Biases, online or offline.",
        config=Ref("d9d_wandb.config:WandbConfig"),
        build=Ref("d9d_wandb.tracker:WandbTracker"),
        requires=frozenset({"import:wandb"}),
    )
