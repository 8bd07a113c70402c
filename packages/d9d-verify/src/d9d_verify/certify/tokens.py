"""Dataset ``certificate_tokens``: token ids that depend on the seed only, for certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from d9d_core.config import PluginConfig
from d9d_core.data import DataContext
from d9d_core.types import Pack, State
from pydantic import PositiveInt


class CertificateTokensConfig(PluginConfig):
    """Token ids drawn at random, in samples of one document."""

    name: Literal["certificate_tokens"] = "certificate_tokens"
    """Selects the dataset."""

    vocab_size: PositiveInt = 64
    """Number of token ids."""

    sequence_length: PositiveInt = 16
    """Positions of a sample."""


class CertificateTokens:
    """Stream of packs of ``tokens`` and ``targets``, int64 [samples, positions]; a fifth of the targets is ignored."""

    def __init__(self, config: CertificateTokensConfig, context: DataContext) -> None:
        self._config, self._context, self._packs = config, context, 0

    @property
    def facts(self) -> State:
        """Facts of the data: vocabulary size and sequence length."""
        return {"vocab_size": self._config.vocab_size, "sequence_length": self._config.sequence_length}

    def next_pack(self) -> Pack:
        """Draw the next microbatches of this rank."""
        context, config = self._context, self._config
        draws = torch.Generator().manual_seed(context.seed * 1_000_003 + self._packs)
        self._packs += 1
        drawn = torch.randint(config.vocab_size, (context.batch_size, config.sequence_length + 1), generator=draws)
        targets = drawn[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=draws) < 0.2] = -100
        mine = slice(*(part * context.batch_size // context.ranks for part in (context.rank, context.rank + 1)))
        parts = (torch.split(tensor[mine].contiguous(), context.microbatch_size) for tensor in (drawn[:, :-1], targets))
        return [{"tokens": tokens, "targets": ids} for tokens, ids in zip(*parts, strict=True)]

    def state(self) -> State:
        """Position of the stream: the number of packs that were drawn."""
        return {"packs": self._packs}

    def load_state(self, state: State) -> None:
        """Continue after the packs that were drawn when the state was saved."""
        self._packs = int(str(state["packs"]))

    def save_assets(self, directory: Path) -> None:
        """Write nothing: there is no tokenizer."""
