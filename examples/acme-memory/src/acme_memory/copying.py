"""Dataset ``copying``. Shapes: B samples, S positions; S is twice the number of symbols."""

from __future__ import annotations

from pathlib import Path

import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.types import Pack, State

from acme_memory.config import CopyingConfig

_IGNORE = -100


class Copying:
    """Stream of packs with ``tokens`` and ``targets``, int64 [B, S]; only the repeated symbols are targets.

    A sample depends only on the seed and its index, so that any rank can make it, and a run can resume anywhere.
    """

    def __init__(self, config: CopyingConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self._taken = 0

    @property
    def facts(self) -> State:
        """Facts that the task compares with the model, and for one pass the number of samples."""
        facts: dict[str, int] = {"vocab_size": self._config.vocab_size, "sequence_length": 2 * self._config.symbols}
        one_pass = {"samples": self._config.samples, "rows": self._config.samples}
        return {**facts, **one_pass} if self._context.one_pass else facts

    def next_pack(self) -> Pack:
        """Next microbatches of this rank, for one optimizer step."""
        context = self._context
        share = context.batch_size // context.ranks
        first = self._taken + context.rank * share
        self._taken += context.batch_size
        indices = torch.arange(first, first + share)
        samples = torch.stack([self._sample(index) for index in indices.tolist()])
        tokens, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        targets[:, : self._config.symbols] = _IGNORE
        pack = {"tokens": tokens, "targets": targets}
        if context.one_pass:  # samples after the last one fill the pack and do not count
            pack["rows"] = torch.where(indices < self._config.samples, indices, -1)
            targets[pack["rows"] < 0] = _IGNORE
        parts = {name: torch.split(tensor, context.microbatch_size) for name, tensor in pack.items()}
        return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]

    def state(self) -> State:
        """Number of samples that all ranks took, and facts that identify the data."""
        return {"taken": self._taken, **self.facts}

    def load_state(self, state: State) -> None:
        """Continue after the samples already taken.

        Raises:
            DataError: the state belongs to other data.
        """
        taken = state.get("taken")
        if not isinstance(taken, int) or any(state.get(name) != value for name, value in self.facts.items()):
            raise DataError(f"data: the checkpoint was saved with {state}, the job has {self.facts}; keep the fields")
        self._taken = taken

    def save_assets(self, directory: Path) -> None:
        """Write nothing: these tokens have no tokenizer."""

    def _sample(self, index: int) -> torch.Tensor:
        """Sample with a given index, int64 [S + 1]."""
        generator = torch.Generator().manual_seed(self._context.seed * 1_000_003 + index)
        symbols = torch.randint(1, self._config.vocab_size, (self._config.symbols,), generator=generator)
        return torch.cat([symbols, torch.zeros(1, dtype=torch.int64), symbols])
