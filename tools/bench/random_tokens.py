"""A plugin with a dataset of random tokens, so that nothing but the step is measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from d9d_core.data import DataContext
from d9d_core.plugin import DatasetSpec, Ref, hookimpl
from d9d_core.types import Pack
from torch import Tensor


class Synthetic:
    """A plugin with one dataset: random tokens."""

    D9D_API = 2

    @hookimpl
    def d9d_datasets(self) -> Iterator[DatasetSpec]:
        """The dataset ``random_tokens``."""
        yield DatasetSpec(
            name="random_tokens",
            summary="Random tokens.",
            config=Ref(f"{__name__}:RandomTokensConfig"),
            build=Ref(f"{__name__}:RandomTokens"),
        )


def _config() -> Any:
    from typing import Literal

    from d9d_core.config import PluginConfig

    class RandomTokensConfig(PluginConfig):
        """Config of ``random_tokens``."""

        name: Literal["random_tokens"] = "random_tokens"
        """Selects the dataset."""
        vocab_size: int
        """Number of token ids."""
        sequence_length: int
        """Positions of a sample."""
        document: int | None = None
        """Positions of each document in a sample; a sample is one document if absent."""

        @property
        def packs_documents(self) -> bool:
            """Whether samples hold several documents."""
            return self.document is not None

    return RandomTokensConfig


RandomTokensConfig = _config()


def drawn(samples: int, length: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets of samples, int64 [samples, length] each."""
    row = torch.randint(vocabulary, (samples, length + 1), generator=generator)
    return row[:, :-1].contiguous(), row[:, 1:].clone()


class RandomTokens:
    """Stream with the same microbatches in every pack."""

    def __init__(self, config: Any, context: DataContext) -> None:
        generator = torch.Generator().manual_seed(context.rank)
        count = context.batch_size // context.ranks // context.microbatch_size
        samples, length = context.microbatch_size, config.sequence_length
        pairs = [drawn(samples, length, config.vocab_size, generator) for _ in range(count)]
        self._pack = [{"tokens": tokens, "targets": targets} for tokens, targets in pairs]
        if config.document is not None:
            places = torch.arange(length).expand(samples, -1)
            for microbatch in self._pack:
                microbatch["documents"] = places // config.document
                microbatch["positions"] = places % config.document
                # The last token of a document has no target.
                microbatch["targets"][(places + 1) % config.document == 0] = -100
        self.facts = {"vocab_size": config.vocab_size, "sequence_length": config.sequence_length}

    def next_pack(self) -> Pack:
        """Return the pack."""
        return self._pack

    def state(self) -> dict[str, Any]:
        """Empty state: all packs are equal."""
        return {}

    def load_state(self, state: Any) -> None:
        """Do nothing."""

    def save_assets(self, directory: Path) -> None:
        """Save nothing."""
