"""Dataset whose samples depend on the seed and their number."""

from pathlib import Path

import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.types import Pack, State

from frozen_api_2.config import WavesConfig


class Waves:
    def __init__(self, config: WavesConfig, context: DataContext) -> None:
        self.config, self.context, self.taken = config, context, 0

    @property
    def facts(self) -> State:
        samples = self.config.samples
        counts = (
            {}
            if samples is None
            else dict.fromkeys(("samples", "rows") if self.context.one_pass else ("samples",), samples)
        )
        return {"width": self.config.width, **counts}

    def next_pack(self) -> Pack:
        context = self.context
        share = context.batch_size // context.ranks
        first = self.taken + context.rank * share
        self.taken += context.batch_size
        numbers = torch.arange(first, first + share)
        x = torch.stack([self.sample(int(number)) for number in numbers])
        tensors = {"x": x, "y": torch.sin(self.config.sizes.slope * x)}
        if "rows" in self.facts:
            assert self.config.samples is not None
            tensors["rows"] = torch.where(numbers < self.config.samples, numbers, -1)
        parts = {name: torch.split(tensor, context.microbatch_size) for name, tensor in tensors.items()}
        return [{name: parts[name][index] for name in parts} for index in range(len(parts["x"]))]

    def sample(self, number: int) -> torch.Tensor:
        return torch.randn(self.config.width, generator=torch.Generator().manual_seed(self.context.seed + number))

    def state(self) -> State:
        return {"taken": self.taken, "width": self.config.width}

    def load_state(self, state: State) -> None:
        if state["width"] != self.config.width:
            raise DataError("the checkpoint belongs to other data")
        assert isinstance(state["taken"], int)
        self.taken = state["taken"]

    def save_assets(self, directory: Path) -> None:
        (directory / "waves.txt").write_text(str(self.config.width))
