"""Plugin declaration of the tracker ``mlflow``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, TrackerSpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Declare the tracker ``mlflow``."""
    yield TrackerSpec(
        name="mlflow",
        summary="Runs in MLflow, on a server or in a local store.",
        config=Ref("d9d_mlflow.config:MlflowConfig"),
        build=Ref("d9d_mlflow.tracker:MlflowTracker"),
        requires=frozenset({"import:mlflow"}),
    )
