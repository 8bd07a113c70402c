"""Config of the dataset ``mixture``."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from d9d_core.config import PluginConfig, Section
from d9d_core.data import SampleLengths, packs_documents, sample_lengths
from d9d_core.job_file.open_union import Named
from pydantic import Field, model_validator


class MixturePart(Section):
    """Part of a mixture."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of the samples, relative to the weights of the other parts."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over this part's samples, after which the others go on without it; null repeats it without end."""
    data: Annotated[PluginConfig, Named("dataset")]
    """Dataset of the part."""


class MixtureConfig(PluginConfig):
    """Dataset of samples of several datasets, in exact proportions at any moment."""

    name: Literal["mixture"] = "mixture"
    """Selects the plugin."""
    parts: tuple[MixturePart, ...]
    """Datasets with their weights."""
    workers: int = Field(default=0, ge=0)
    """Processes that build packs ahead; 0 builds them where they are asked for. Has no say in what is in them."""

    @property
    def packs_documents(self) -> bool | None:
        """Whether samples of some part hold several documents; ``None`` if none surely does, and not all say."""
        return packs_documents(*(part.data for part in self.parts))

    @property
    def sample_lengths(self) -> SampleLengths | None:
        """Lengths of microbatches, which have samples of any part; ``None`` if a part does not say."""
        found = [lengths for part in self.parts if (lengths := sample_lengths(part.data)) is not None]
        if len(found) < len(self.parts) or len({lengths.texts for lengths in found}) > 1:
            return None
        most = [lengths.most for lengths in found if lengths.most is not None]
        multiple = math.gcd(*(lengths.multiple for lengths in found))
        return SampleLengths(multiple, max(most) if len(most) == len(found) else None, found[0].texts)

    @model_validator(mode="after")
    def _something_is_mixed(self) -> Self:
        # A length in the field's type would also count parts that have mistakes of their own as absent.
        if not self.parts:
            raise ValueError("parts is empty; write a list such as [{weight: 3, data: {name: text, ...}}]")
        return self
