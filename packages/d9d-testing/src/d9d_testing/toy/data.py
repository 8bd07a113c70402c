"""Toy datasets, which draw each pack from the seed and the number of the pack."""

from __future__ import annotations

from pathlib import Path

import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.types import Pack, State

from d9d_testing.toy.config import ToyDataConfig, ToyTokensConfig


class ToyStream:
    """Stream of the toy data: packs of ``x``, ``y`` and ``mask``; in one pass over ``samples``, also of ``rows``."""

    def __init__(self, config: ToyDataConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self._packs = 0

    @property
    def facts(self) -> State:
        """Number of features; if configured, samples per epoch and, in one pass, rows."""
        names = ("samples", "rows") if self._context.one_pass else ("samples",)
        counts = {} if self._config.samples is None else dict.fromkeys(names, self._config.samples)
        return {"features": self._config.features, **counts}

    def next_pack(self) -> Pack:
        """Next microbatches of this rank."""
        size, micro = self._context.batch_size, self._context.microbatch_size
        generator = torch.Generator().manual_seed(self._context.seed * 1_000_003 + self._packs)
        x = torch.randn(size, self._config.features, generator=generator)
        y = torch.sin(x)
        if self._packs == self._config.nan_at:
            y = torch.full_like(y, torch.nan)
        mask = torch.zeros(size) if self._packs == self._config.masked_at else torch.ones(size)
        rows = torch.arange(self._packs * size, (self._packs + 1) * size)
        if self._config.samples is not None and self._context.one_pass:
            rows[rows >= self._config.samples] = -1
        self._packs += 1
        mine = slice(
            self._context.rank * size // self._context.ranks, (self._context.rank + 1) * size // self._context.ranks
        )
        tensors = {"x": x, "y": y, "mask": mask} | ({"rows": rows} if "rows" in self.facts else {})
        parts = {name: torch.split(tensor[mine], micro) for name, tensor in tensors.items()}
        return [{name: parts[name][index] for name in tensors} for index in range(len(parts["x"]))]

    def state(self) -> State:
        """State for checkpoints: the number of packs read so far, and the number of features."""
        return {"packs": self._packs, "features": self._config.features}

    def load_state(self, state: State) -> None:
        """Continue after the number of packs in a saved state.

        Raises:
            DataError: the state is of data with another number of features.
        """
        if state["features"] != self._config.features:
            raise DataError("the checkpoint was saved with other data; use another run.name")
        packs = state["packs"]
        assert isinstance(packs, int)
        self._packs = packs

    def save_assets(self, directory: Path) -> None:
        """Write one file, as an example of an asset such as a tokenizer."""
        (directory / "features.txt").write_text(str(self._config.features))


class ToyTokens:
    """Stream of toy tokens: packs of ``tokens`` and ``targets``, int64 [samples, positions].

    Some targets are ignored.
    """

    def __init__(self, config: ToyTokensConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self._packs = 0

    @property
    def facts(self) -> State:
        """Vocabulary size and sequence length."""
        return {"vocab_size": self._config.vocab_size, "sequence_length": self._config.sequence_length}

    def next_pack(self) -> Pack:
        """Next microbatches of this rank."""
        context, config = self._context, self._config
        generator = torch.Generator().manual_seed(context.seed * 1_000_003 + self._packs)
        shape = (context.batch_size, config.sequence_length + 1)
        drawn = torch.randint(config.vocab_size, shape, generator=generator)
        targets = drawn[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        self._packs += 1
        share = context.batch_size // context.ranks
        mine = slice(context.rank * share, (context.rank + 1) * share)
        parts = (torch.split(tensor[mine], context.microbatch_size) for tensor in (drawn[:, :-1], targets))
        return [{"tokens": tokens.contiguous(), "targets": target} for tokens, target in zip(*parts, strict=True)]

    def state(self) -> State:
        """State for checkpoints: the number of packs read so far."""
        return {"packs": self._packs}

    def load_state(self, state: State) -> None:
        """Continue after the number of packs in a saved state."""
        packs = state["packs"]
        assert isinstance(packs, int)
        self._packs = packs

    def save_assets(self, directory: Path) -> None:
        """Write nothing: there is no tokenizer."""
