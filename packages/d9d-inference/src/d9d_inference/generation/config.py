"""Config of the subscriber ``samples``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

#: A text, or its token ids.
SamplePrompt = Annotated[str, Field(min_length=1)] | Annotated[list[NonNegativeInt], Field(min_length=1)]


class SamplesConfig(PluginConfig):
    """Continuations of fixed prompts during training, in ``<run>/samples.jsonl`` and as printed lines.

    Each token costs a forward over all prompts; the training is bit for bit the one without this subscriber.
    """

    name: Literal["samples"] = "samples"
    """Selects this subscriber."""

    every: PositiveInt
    """Steps between two sets of samples; there is one before the first step and one after the last, too."""

    prompts: list[SamplePrompt] = []
    """Texts to continue, or lists of token ids. Special tokens in a text count as such, so a chat is written as the
    model's template renders it."""

    file: Path | None = None
    """File of JSON lines with ``prompt``, in place of ``prompts``."""

    max_new_tokens: PositiveInt = 32
    """Most tokens of a continuation."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0 takes the most probable token; else tokens are drawn, with a generator of its own."""

    seed: NonNegativeInt = 0
    """Seed of the draws; each set of samples has its own from this and the step."""

    stop: list[NonNegativeInt] | None = None
    """Token ids that end a text; by default those of ``model.pretrained``, or else that of the data."""

    rows: PositiveInt = 8
    """Prompts of one forward: logits of so many padded prompts are in memory at once."""

    show: bool = True
    """Print a line for each sample."""

    @model_validator(mode="after")
    def _has_prompts(self) -> SamplesConfig:
        if bool(self.prompts) == (self.file is not None):
            raise ValueError("give either 'prompts', a list of texts or of token ids, or 'file', with one at least")
        return self
