"""Config of the subscriber ``samples``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

#: Prompt: a text, or token ids.
SamplePrompt = Annotated[str, Field(min_length=1)] | Annotated[list[NonNegativeInt], Field(min_length=1)]


class SamplesConfig(PluginConfig):
    """Continues fixed prompts during training; writes the texts to ``<run>/samples.jsonl`` and prints them.

    Each token costs a forward over all prompts; the training result stays bitwise the same.
    """

    name: Literal["samples"] = "samples"
    """Selects this subscriber."""

    every: PositiveInt
    """Number of steps between two sets of samples; there are also samples before the first and after the last step."""

    prompts: list[SamplePrompt] = []
    """Texts to continue, or lists of token ids. Special tokens in a text are recognised, so write a chat as the
    model's template renders it."""

    file: Path | None = None
    """File of JSON lines with ``prompt``, instead of ``prompts``."""

    max_new_tokens: PositiveInt = 32
    """Largest number of tokens of a continuation."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Sampling temperature; 0 takes the most probable token. Draws use a separate generator."""

    seed: NonNegativeInt = 0
    """Seed of the sampling, combined with the step."""

    stop: list[NonNegativeInt] | None = None
    """Token ids that end a text; by default the end-of-text tokens of ``model.pretrained``, or else of the data, and
    the stop tokens that the data trains."""

    rows: PositiveInt = 8
    """Number of prompts in one forward, whose padded logits are in memory at once."""

    show: bool = True
    """Whether to print a line for each sample."""

    @model_validator(mode="after")
    def _has_prompts(self) -> SamplesConfig:
        if bool(self.prompts) == (self.file is not None):
            raise ValueError("give either 'prompts', a list of texts or token ids, or 'file', with at least one prompt")
        return self
