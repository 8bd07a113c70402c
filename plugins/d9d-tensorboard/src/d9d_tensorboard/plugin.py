"""Plugin declaration of the tracker ``tensorboard``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, TrackerSpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """Declare the tracker ``tensorboard``."""
    yield TrackerSpec(
        name="tensorboard",
        summary="Event files for TensorBoard: curves, histograms, texts, pictures, tables.",
        config=Ref("d9d_tensorboard.config:TensorBoardConfig"),
        build=Ref("d9d_tensorboard.tracker:TensorBoardTracker"),
        requires=frozenset({"import:tensorboard"}),
    )
