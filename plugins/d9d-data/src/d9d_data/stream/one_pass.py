"""One pass over a dataset: every sample once, in the order of the sources, then fillers up to a whole pack.

A filler is a repeated sample without targets, so that the last step has a full batch.

:mod:`d9d_core.data` specifies such streams. Samples are sorted by length inside blocks of microbatches. The number of
microbatches of a block is the largest power of two, at most eight, that divides one eighth (rounded down, at least 1)
of the number of microbatches of a pack (the samples of a step). It depends on the job file alone. If the number of
microbatches of a pack is a multiple of eight, each of one, two, four or eight ranks has whole blocks.

Shapes: b samples, B rows of tensors (b times the texts of a sample).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.types import State

from d9d_data.config import PreparedConfig
from d9d_data.corpus.prepare import Corpus
from d9d_data.order.layout import Layout
from d9d_data.stream.base import PackStream, facts_of
from d9d_data.stream.packing import NO_TARGET
from d9d_data.stream.reader import Arrays

#: Name of the tensor [B] with the index of each row in the dataset, -1 for fillers.
ROWS = "rows"
# Most microbatches of a block, and the divisor of a pack's microbatches.
_BLOCK = 8

Int64 = npt.NDArray[np.int64]


class SampleSource(Protocol):
    """Source of arbitrary samples of a dataset, in the order of its sources; can be pickled."""

    def sizes(self, samples: Int64) -> npt.NDArray[Any]:
        """Lengths [b] for sorting samples; equal lengths keep the order."""
        ...

    def microbatch(self, samples: Int64) -> Mapping[str, npt.NDArray[Any]]:
        """Microbatch of samples, with ``rows`` [B]."""
        ...


@dataclass(frozen=True, slots=True)
class OnePassPacks:
    """Source of one rank's share of any pack (samples of a step) of one pass over the data.

    Attributes:
        source: source of microbatches.
        samples: number of samples.
        layout: layout of the packs.
        block: number of samples sorted together, a divisor of a rank's share.
    """

    source: SampleSource
    samples: int
    layout: Layout
    block: int

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches of this rank, block by block; in each block the shortest samples first."""
        begin = consumed + self.layout.rank * self.layout.share
        blocks = range(begin, begin + self.layout.share, self.block)
        return [microbatch for first in blocks for microbatch in self._block(first)]

    def _block(self, first: int) -> Arrays:
        real = np.arange(min(first, self.samples), min(first + self.block, self.samples), dtype=np.int64)
        if len(real) and self.block > self.layout.microbatch_size:
            # Stable: samples of equal length keep their order.
            real = real[np.argsort(self.source.sizes(real), kind="stable")]
        size = self.layout.microbatch_size
        return [self._microbatch(real[begin : begin + size]) for begin in range(0, self.block, size)]

    def _microbatch(self, real: Int64) -> Mapping[str, npt.NDArray[Any]]:
        fillers = self.layout.microbatch_size - len(real)
        if not fillers:
            return self.source.microbatch(real)
        # A filler repeats the shortest sample of the microbatch, so that it adds no padding.
        repeated = np.full(fillers, real[0] if len(real) else 0, dtype=np.int64)
        return _without_targets(self.source.microbatch(np.concatenate([real, repeated])), len(real), fillers)


class OnePassStream(PackStream):
    """Stream of one pass over a dataset; see :class:`d9d_core.data.DataStream`.

    Args:
        source: source of microbatches.
        samples: number of samples.
        rows: number of rows of all samples; a sample of several texts has a row for each.
        context: context of the job.
        workers: number of processes that build packs ahead.
        identity: text with all settings and digests that determine the index of each sample.
        needs: names of the settings in ``identity``, for error messages.
        facts: facts of the data.
        save_assets: function that writes the files that an exported model needs.
        window: maximum number of samples to sort together, if the job file sets it.

    Raises:
        DataError: the ranks cannot have whole blocks.
    """

    def __init__(
        self,
        source: SampleSource,
        samples: int,
        rows: int,
        context: DataContext,
        workers: int,
        identity: str,
        needs: str,
        facts: State,
        save_assets: Callable[[Path], None],
        window: int | None = None,
    ) -> None:
        layout = Layout.of(context)
        packs = OnePassPacks(source, samples, layout, _block_size(layout, window))
        super().__init__(packs, layout.batch_size, workers, f"one pass {identity}", needs)
        self._facts: State = {**facts, "samples": samples, ROWS: rows}
        self._save_assets = save_assets

    @property
    def facts(self) -> State:
        """Facts of the data, with the numbers of ``samples`` and ``rows``."""
        return self._facts

    def save_assets(self, directory: Path) -> None:
        """Write files of the data that an exported model needs, such as the tokenizer's."""
        self._save_assets(directory)


def one_pass_of(
    corpus: Corpus,
    source: SampleSource,
    sizes: tuple[int, int],
    config: PreparedConfig,
    context: DataContext,
    identity: str,
    facts: State,
    window: int | None,
) -> OnePassStream:
    """Make a stream of one pass over a corpus.

    Args:
        corpus: corpus to read.
        source: source of microbatches.
        sizes: numbers of samples and of rows.
        config: config of the dataset.
        context: context of the job.
        identity: text with all settings and digests that determine the index of each sample.
        facts: facts to add to the facts of the corpus.
        window: maximum number of samples to sort together, if the job file sets it.

    Raises:
        DataError: there are no samples, or the ranks cannot have whole blocks.
    """
    if not sizes[0]:
        raise DataError(
            f"data.split: the {config.split} split is empty, so a pass over it has no sample; use other data"
        )
    return OnePassStream(
        source,
        *sizes,
        context,
        config.workers,
        identity,
        "the contents of the sources, tokenizer, split, held_out, packing and sequence_length",
        {**facts_of(corpus), "sequence_length": config.sequence_length, **facts},
        corpus.save_assets,
        window,
    )


def _block_size(layout: Layout, window: int | None) -> int:
    """Number of samples sorted together, which is independent of the number of ranks.

    Raises:
        DataError: a rank's share is not a multiple of the block size.
    """
    size, ranks = layout.microbatch_size, layout.ranks

    def microbatches_of(batch_size: int) -> int:
        count = batch_size // size
        block = math.gcd(_BLOCK, count // math.gcd(_BLOCK, count))  # so 1, 2, 4 or 8 ranks get whole blocks
        return block if window is None else math.gcd(block, max(window // size, 1))

    def fits(batch_size: int) -> bool:
        return batch_size // ranks % (microbatches_of(batch_size) * size) == 0

    block = microbatches_of(layout.batch_size) * size
    if not fits(layout.batch_size):
        unit = size * ranks
        below = next(filter(fits, range(layout.batch_size - unit, 0, -unit)), None)
        above = next(filter(fits, range(layout.batch_size + unit, 2 * _BLOCK**2 * unit + layout.batch_size, unit)))
        options = " or ".join(str(option) for option in (below, above) if option)
        raise DataError(
            f"batch.size: one pass over the data sorts blocks of {block} samples by length, so the samples of a rank "
            f"must be a multiple of {block}; a batch of {layout.batch_size} over {ranks} ranks gives {layout.share} to "
            f"each; use a batch of {options}, or set bucket_window of this data to {size}, which disables sorting"
        )
    return block


def _without_targets(
    microbatch: Mapping[str, npt.NDArray[Any]], real: int, fillers: int
) -> dict[str, npt.NDArray[Any]]:
    """Microbatch whose last samples are fillers: their ``rows`` are -1, and they have nothing to learn."""
    changed = dict(microbatch)
    first = len(microbatch[ROWS]) // (real + fillers) * real
    values = {ROWS: -1, "targets": NO_TARGET, "labels": NO_TARGET, "weights": 0}
    if "samples" in changed and "targets" not in changed:
        values["lengths"] = 0  # a contrastive loss ignores texts of length 0
    for name, value in values.items():
        if name in changed and changed[name].dtype.kind in "if":
            changed[name] = changed[name].copy()
            changed[name][first:] = value
    return changed
