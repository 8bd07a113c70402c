"""Which layers belong to which pipeline stage."""

from __future__ import annotations

from d9d_core.errors import BuildError
from d9d_core.protocols import Stage


def stage_layers(layers: int, stage: Stage) -> range:
    """The layers of one stage: contiguous, sizes differing by at most one, the first stages taking the rest.

    The last stage gets no extra layer because it also holds the head.

    Args:
        layers: layers of the whole model.
        stage: which stage.

    Raises:
        BuildError: there are more stages than layers.
    """
    if stage.count > layers:
        raise BuildError(f"{layers} layers cannot be split over {stage.count} stages; use at most {layers} stages")
    size, rest = divmod(layers, stage.count)
    start = stage.index * size + min(stage.index, rest)
    return range(start, start + size + (stage.index < rest))
