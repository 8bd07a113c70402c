"""Config of the dataset ``mixture``."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from d9d_core.config import PluginConfig, Section
from d9d_core.data import SampleLengths, packs_documents, sample_lengths
from d9d_core.job_file.open_union import Named
from pydantic import Field, model_validator


class MixturePart(Section):
    """Part of a mixture: a dataset with its weight and its number of epochs."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Relative frequency of this part's samples; the fraction is the weight divided by the sum of all weights."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over this part's samples, after which the mixture continues without it; null repeats the part forever."""
    data: Annotated[PluginConfig, Named("dataset")]
    """Dataset of the part."""


class MixtureConfig(PluginConfig):
    """Dataset that mixes the samples of several datasets in exact proportions at any moment."""

    name: Literal["mixture"] = "mixture"
    """Selects the plugin."""
    parts: tuple[MixturePart, ...]
    """Datasets with their weights."""
    workers: int = Field(default=0, ge=0)
    """Processes that build packs ahead; 0 builds them in this process. The packs do not depend on it."""

    @property
    def packs_documents(self) -> bool | None:
        """Whether samples can hold several documents; ``None`` if unknown."""
        return packs_documents(*(part.data for part in self.parts))

    @property
    def sample_lengths(self) -> SampleLengths | None:
        """Possible sample lengths of a mixed microbatch; ``None`` if the lengths of a part are unknown."""
        found = [lengths for part in self.parts if (lengths := sample_lengths(part.data)) is not None]
        if len(found) < len(self.parts) or len({lengths.texts for lengths in found}) > 1:
            return None
        most = [lengths.most for lengths in found if lengths.most is not None]
        multiple = math.gcd(*(lengths.multiple for lengths in found))
        return SampleLengths(multiple, max(most) if len(most) == len(found) else None, found[0].texts)

    @model_validator(mode="after")
    def _something_is_mixed(self) -> Self:
        # A length constraint in the field's type would count parts with errors of their own as missing.
        if not self.parts:
            raise ValueError("parts is empty; write a list such as [{weight: 3, data: {name: text, ...}}]")
        return self
