"""Microbatches that all contenders see: the same numbers in every process, from seeds alone.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from d9d_core.config import PluginConfig
from d9d_core.data import DataContext
from d9d_core.plugin import DatasetSpec, Ref, hookimpl
from d9d_core.types import Pack
from settings import Data, Setting
from torch import Tensor

#: Number of different microbatches, over which the steps cycle.
DIFFERENT = 4
#: Median document length, and standard deviation of the log length, as for web pages.
MEDIAN, SPREAD = 300, 1.0
NO_TARGET = -100


def microbatch_of(setting: Setting, number: int) -> dict[str, Tensor]:
    """Microbatch of a step, on the CPU.

    Args:
        setting: setting of the comparison, which gives the sizes.
        number: number of the microbatch, which seeds its content.

    Returns:
        ``tokens`` and ``targets`` int64 [B, S]; packed data has ``positions`` and ``documents`` too, and no target
        where the next token is another document's. A document ends with the last token id, which stands nowhere else.
    """
    vocabulary = setting.model_values["vocab_size"]
    generator = torch.Generator().manual_seed(number)
    shape = (setting.samples, setting.length + 1)
    if setting.data == "random":
        row = torch.randint(vocabulary, shape, generator=generator)
        return {"tokens": row[:, :-1].contiguous(), "targets": row[:, 1:].contiguous()}
    # Token frequencies follow Zipf's law: the n-th most frequent token is n times as rare as the first.
    words = torch.exp(torch.rand(shape, generator=generator) * torch.log(torch.tensor(float(vocabulary - 1))))
    row = words.long().clamp(1, vocabulary - 1) - 1
    starts = torch.zeros(shape, dtype=torch.long)
    for sample in starts:
        place = 0
        while True:
            drawn = torch.randn((), generator=generator).mul(SPREAD).exp().mul(min(MEDIAN, setting.length / 4))
            place += max(2, int(drawn))
            if place > setting.length:
                break
            sample[place] = 1
    ends = starts.roll(-1, 1)
    ends[:, -1] = 0
    row = torch.where(ends.bool(), vocabulary - 1, row)
    documents = starts.cumsum(1)
    places = torch.arange(setting.length + 1).expand(shape)
    first = torch.where(starts.bool(), places, 0).cummax(1).values
    targets = torch.where(documents[:, 1:] == documents[:, :-1], row[:, 1:], NO_TARGET)
    return {
        "tokens": row[:, :-1].contiguous(),
        "targets": targets,
        "positions": (places - first)[:, :-1].contiguous(),
        "documents": documents[:, :-1].contiguous(),
    }


class ComparedConfig(PluginConfig):
    """Config of the dataset ``compared``."""

    name: Literal["compared"] = "compared"
    """Selects the dataset."""
    model: str
    """Name of the model in :data:`settings.MODELS`."""
    sequence_length: int
    """Positions of a sample."""
    samples: int
    """Samples of a microbatch."""
    data: Data
    """Kind of the data."""

    @property
    def packs_documents(self) -> bool:
        """Whether samples hold several documents."""
        return self.data == "packed"


class Compared:
    """Stream of the microbatches, one per step."""

    def __init__(self, config: ComparedConfig, _: DataContext) -> None:
        setting = Setting(config.model, config.sequence_length, config.samples, config.data)
        self._packs = [[microbatch_of(setting, number)] for number in range(DIFFERENT)]
        self._taken = 0
        vocabulary = setting.model_values["vocab_size"]
        self.facts = {"vocab_size": vocabulary, "sequence_length": config.sequence_length}

    def next_pack(self) -> Pack:
        """Next pack."""
        self._taken += 1
        return self._packs[(self._taken - 1) % DIFFERENT]

    def state(self) -> dict[str, Any]:
        """Number of packs read so far."""
        return {"taken": self._taken}

    def load_state(self, state: Any) -> None:
        """Continue after the packs already read."""
        self._taken = state["taken"]

    def save_assets(self, directory: Path) -> None:
        """Save nothing."""


class ComparedPlugin:
    """Plugin with the one dataset."""

    D9D_API = 2

    @hookimpl
    def d9d_datasets(self) -> Iterator[DatasetSpec]:
        """The dataset ``compared``."""
        yield DatasetSpec(
            name="compared",
            summary="Tokens that all contenders see.",
            config=Ref(f"{__name__}:ComparedConfig"),
            build=Ref(f"{__name__}:Compared"),
        )
