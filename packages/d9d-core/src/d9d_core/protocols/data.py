"""Data streams: resumable packs of microbatches for one data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from d9d_core.types import Pack, State


@dataclass(frozen=True, slots=True)
class DataContext:
    """Facts of the job that a data stream needs.

    Attributes:
        seed: data order depends on this and on the number of consumed samples, on nothing else.
        batch_size: samples of one optimizer step, over all ranks.
        microbatch_size: samples of one microbatch on one rank.
        rank, ranks: the slice of each pack this process gets, along the data-parallel axis.
        cache_dir: where prepared data may be kept between runs.
        note: prints one line about long work, such as tokenisation.
        pretrained: directory or address of the weights that the model starts from, if it does.
    """

    seed: int
    batch_size: int
    microbatch_size: int
    cache_dir: Path
    rank: int = 0
    ranks: int = 1
    note: Callable[[str], None] = lambda _text: None
    pretrained: str | None = None


class DataStream(Protocol):
    """An endless, resumable stream of packs for one data-parallel rank."""

    @property
    def facts(self) -> State:
        """Facts about the data, such as ``vocab_size``, ``sequence_length`` or ``unigram_entropy``; alike on all ranks.

        ``samples`` is the number of samples of an epoch, if there are epochs: a job with ``epochs`` needs it.
        """
        ...

    def next_pack(self) -> Pack:
        """Next pack: the microbatches of the next optimizer step, as CPU tensors."""
        ...

    def state(self) -> State:
        """Position of the stream: after a load, :meth:`next_pack` returns exactly the packs not yet taken."""
        ...

    def load_state(self, state: State) -> None:
        """Continue at the position ``state``.

        Raises:
            DataError: the state belongs to other data.
        """
        ...

    def save_assets(self, directory: Path) -> None:
        """Write what an exported model needs from the data, such as tokenizer files."""
        ...
