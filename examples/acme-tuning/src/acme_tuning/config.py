"""Config classes, which define the fields of the components in a job file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from d9d_core.config import PluginConfig
from d9d_nn.heads.config import HeadSizes, PluginHeadConfig
from pydantic import Field

if TYPE_CHECKING:
    from torch import nn


class SignumConfig(PluginConfig):
    """Sign of the averaged gradient."""

    name: Literal["signum"] = "signum"
    """Selects this optimizer."""
    lr: Annotated[float, Field(gt=0)]
    """Learning rate: the size of each update of a weight."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the average."""


class CosineRestartsConfig(PluginConfig):
    """Cosine that starts again at the full rate."""

    name: Literal["cosine_restarts"] = "cosine_restarts"
    """Selects this schedule."""
    cycle: Annotated[int, Field(ge=1)] = 100
    """Number of steps of the first cycle."""
    growth: Annotated[int, Field(ge=1)] = 2
    """Factor from the length of one cycle to the next."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Factor on the learning rate at the end of a cycle."""


class NormsConfig(PluginConfig):
    """Training of the weights of normalisation layers only."""

    name: Literal["norms"] = "norms"
    """Selects this method."""
    match: str = "*norm*"
    """Pattern of the names of normalisation layers."""


class HostActivationsConfig(PluginConfig):
    """Activations of blocks in host memory."""

    name: Literal["host_activations"] = "host_activations"
    """Selects this strategy."""
    pin_memory: bool = False
    """Copy through pinned memory, which is faster on a GPU."""


class VGpipeConfig(PluginConfig):
    """All forwards, then all backwards, in a V."""

    name: Literal["v_gpipe"] = "v_gpipe"
    """Selects this schedule."""


class TwoEndsConfig(PluginHeadConfig):
    """The first and the last state of a text as its vector."""

    kind: Literal["two_ends"] = "two_ends"
    """Selects this head."""

    def build(self, sizes: HeadSizes) -> nn.Module:  # noqa: ARG002 - it has no parameters
        """Build the head."""
        from acme_tuning.two_ends import TwoEnds

        return TwoEnds()
