"""Data streams: resumable packs of microbatches for one data-parallel rank.

Start here: a dataset's ``build(config, context: DataContext)`` returns a :class:`DataStream`::

    import torch

    class Noise:
        def __init__(self, config, context): self.context, self.pack, self.facts = context, 0, {}

        def next_pack(self):
            self.pack += 1
            generator = torch.Generator().manual_seed(self.pack * self.context.ranks + self.context.rank)
            size = self.context.microbatch_size
            count = self.context.batch_size // self.context.ranks // size
            return [{"x": torch.randn(size, 8, generator=generator)} for _ in range(count)]

        def state(self): return {"pack": self.pack}
        def load_state(self, state): self.pack = state["pack"]
        def save_assets(self, directory): ...

Tensors cross seams by name (``Mapping[str, Tensor]``), so that a dataset, a task and a model of three authors meet
without sharing classes. The names for language modelling, used by first-party packages (B samples, S positions):

    tokens     int64 [B, S]   input token ids
    targets    int64 [B, S]   token ids to predict; -100 where nothing is predicted
    positions  int64 [B, S]   position inside the document
    documents  int64 [B, S]   number of the document inside the sample; tokens see their own document only
    lengths    int64 [B]      tokens of a right-padded sample; absent if there is no padding, which counts nowhere
    labels     int64 [B]      class of the sample; -100 where it does not count

Training reads a stream without end. Evaluation and inference make one pass (:attr:`DataContext.one_pass`): every sample
once, in the order of the sources, whatever the config says about shuffling. A stream opened so keeps to this:

- Its facts have ``rows``, the number of rows, which are what an output has a line for: samples, the documents in packed
  samples, or the texts of a sample with several; and ``samples``. A stream without the fact ``rows`` cannot make one
  pass, and whoever asked refuses it.
- Pack p holds the samples [p * batch_size, (p + 1) * batch_size), of which rank r of R has the r-th of R equal runs.
  After the last sample come fillers, so an epoch may be smaller than a batch; packs after the last are fillers alone.
- Every microbatch has ``rows``, int64 [B] for a first dimension of B: number of the first row in that place, or -1 for
  a filler. Fillers come last in their microbatch; what is in them is valid, without targets where there are targets.
  Texts that are compared with each other have ``lengths`` 0 there: whoever compares leaves them out.
  With T texts a sample, text t of sample s is row s * T + t. If the fact ``packed`` is true, a place holds several
  rows: ``documents`` [B, S] numbers them from 0, ``ends`` [B, N] says where each ends, 0 behind the last, and
  ``lengths`` [B] where padding begins.
- A rank's run may be arranged to save padding, within blocks that do not depend on the ranks, of which a run has a
  whole number: which samples share a microbatch, and its padded length, are the same for any number of ranks.
- ``state()`` may be loaded on another number of ranks, at any pack.

A dataset counts the records of its sources that it does not give whole: the fact ``cut_documents`` those that lost a
part because they are too long, ``dropped`` those that are left out. :attr:`DataContext.note` gets a line at each start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from d9d_core.types import Pack, State

__all__ = [
    "ChoosesTensors", "DataContext", "DataStream", "PacksDocuments", "SampleLengths", "StatesLengths", "TextInputs",
    "packs_documents", "sample_lengths",
]  # fmt: skip

#: Tokens of a text that are inputs. ``own``: those that the dataset trains with, where a predicted last token is none;
#: ``with_end``: all of them and the end of text; ``as_encoded``: those that the tokenizer gives, without an end of text
#: that the dataset adds; ``without_end``: all but the end of text. A text that a dataset cannot give so is refused.
TextInputs = Literal["own", "with_end", "as_encoded", "without_end"]


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
        one_pass: give every sample once, in the order of the sources, then fillers; see the module.
        inputs: tokens of a text that are inputs, see :data:`TextInputs`. A head gets those that it is trained with.
    """

    seed: int
    batch_size: int
    microbatch_size: int
    cache_dir: Path
    rank: int = 0
    ranks: int = 1
    note: Callable[[str], None] = lambda _text: None
    pretrained: str | None = None
    one_pass: bool = False
    inputs: TextInputs = "own"


class DataStream(Protocol):
    """An endless, resumable stream of packs for one data-parallel rank; in one pass, fillers have no end."""

    @property
    def facts(self) -> State:
        """Facts about the data, such as ``vocab_size``, ``sequence_length`` or ``unigram_entropy``; alike on all ranks.

        ``samples`` is the number of samples of an epoch, if there are epochs: a job with ``epochs`` needs it. ``rows``
        is the number of rows in one pass, and says that the stream makes one.
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


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """Lengths of the microbatches of a dataset, in positions.

    Attributes:
        multiple: every microbatch is as long as a multiple of this.
        most: length that none exceeds; ``None`` if only the data tells.
        texts: texts of each sample, every one a row of the microbatch.
    """

    multiple: int
    most: int | None = None
    texts: int = 1

    @property
    def fixed(self) -> int | None:
        """Length of all microbatches, if they are equally long."""
        return self.most if self.most == self.multiple else None


@runtime_checkable
class StatesLengths(Protocol):
    """Config of a dataset that says how long microbatches may be, so that a layout is refused before the first one."""

    @property
    def sample_lengths(self) -> SampleLengths | None:
        """Lengths of microbatches; ``None`` if only the data can tell."""
        ...


def sample_lengths(dataset: object) -> SampleLengths | None:
    """Lengths of the microbatches of a dataset, by its config; ``None`` if it does not say."""
    return dataset.sample_lengths if isinstance(dataset, StatesLengths) else None


@runtime_checkable
class ChoosesTensors(Protocol):
    """Config of a dataset whose fields decide which tensors a microbatch has, in place of its record's ``gives``."""

    @property
    def gives(self) -> Mapping[str, int]:
        """Tensors that every microbatch has -> their number of dims."""
        ...


@runtime_checkable
class PacksDocuments(Protocol):
    """Config of a dataset that says whether samples hold several documents, so that kernels are chosen for it."""

    @property
    def packs_documents(self) -> bool | None:
        """Whether samples hold several documents; false if each is one, with nothing but padding behind it.

        ``None`` if only the data can tell.
        """
        ...


def packs_documents(*datasets: object) -> bool | None:
    """Whether samples of some of these datasets hold several documents; ``None`` if none surely does, and not all say.

    Args:
        datasets: their configs.
    """
    answers = [dataset.packs_documents if isinstance(dataset, PacksDocuments) else None for dataset in datasets]
    return True if True in answers else None if None in answers else False
