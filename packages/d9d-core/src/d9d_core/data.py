"""Data streams, which give each data-parallel rank its packs: lists of the microbatches of one optimizer step.

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

Tensors are passed by name (``Mapping[str, Tensor]``), so that a dataset, a task and a model of three authors work
together without shared classes. The names for language modelling, used by first-party packages (B samples, S
positions):

    tokens     int64 [B, S]   input token ids
    targets    int64 [B, S]   token ids to predict; -100 where nothing is predicted
    positions  int64 [B, S]   position inside the document
    documents  int64 [B, S]   index of the document inside the sample; tokens attend to their own document only
    lengths    int64 [B]      number of tokens of each right-padded sample; absent without padding
    labels     int64 [B]      class of the sample; -100 for samples that are not counted

Training reads an endless stream. Evaluation and inference make one pass (:attr:`DataContext.one_pass`): every sample
once, in the order of the sources, even if the config shuffles. A stream opened for one pass follows these rules:

- Its facts include ``samples`` and ``rows``, the number of output rows. A row is a sample, a document of a packed
  sample, or one text of a sample with several texts. A stream without the fact ``rows`` cannot make one pass and is
  refused.
- Pack p holds the samples [p * batch_size, (p + 1) * batch_size); rank r of R has the r-th of R equal slices of these
  samples. After the last sample, packs are padded with fillers (samples that do not count), so an epoch may be smaller
  than a batch; all later packs hold only fillers.
- Every microbatch of B entries has ``rows``, int64 [B]: the row number of each entry (the number of its first row if
  the entry is packed), or -1 for a filler. Fillers come last in their microbatch. A filler has valid token ids, and
  targets of -100. In datasets of texts that are compared with each other, a filler has ``lengths`` 0, so that
  comparisons leave it out. With T texts per sample, text t of sample s is row s * T + t. If the fact ``packed`` is
  true, an entry holds up to N rows: ``documents`` [B, S] numbers them from 0, ``ends`` [B, N] holds the position after
  the last one of each row, then zeros, and ``lengths`` [B] is the position where padding begins.
- A dataset may reorder the samples of a rank to save padding, but only within blocks of fixed size that do not cross
  ranks. So the samples of a microbatch, and its padded length, are the same for any number of ranks.
- ``state()`` may be loaded on another number of ranks, at any pack.

A dataset counts the records of its sources that it shortens or drops: the fact ``cut_documents`` is the number of
documents that were truncated, ``dropped`` the number of records that were left out. At each start, the dataset
reports these numbers through :attr:`DataContext.note`.
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

#: Tokens of a text that become inputs. ``own``: the inputs as in training with the dataset, which may lack the last
#: token, because it is only a target; ``with_end``: all tokens and the end of text; ``as_encoded``: the tokenizer's
#: output, without an end of text added by the dataset; ``without_end``: all tokens but the end of text. A dataset that
#: cannot give its texts in the requested way raises an error.
TextInputs = Literal["own", "with_end", "as_encoded", "without_end"]


@dataclass(frozen=True, slots=True)
class DataContext:
    """Facts of the job that a data stream needs.

    Attributes:
        seed: seed of the data order, which depends on the seed and the number of consumed samples only.
        batch_size: samples of one optimizer step, over all ranks.
        microbatch_size: samples of one microbatch on one rank.
        rank, ranks: index of this process's slice of each pack, and number of slices, along the data-parallel axes.
        cache_dir: directory for prepared data, kept between runs.
        note: function that prints one line about long work, such as tokenisation.
        pretrained: directory or address of the pretrained weights; ``None`` without them.
        one_pass: whether the stream gives every sample once, in the order of the sources, and then fillers; see the
            module docstring.
        inputs: tokens of a text that become inputs, see :data:`TextInputs`. A head needs the tokens with which it was
            trained.
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
    """Endless, resumable stream of packs (the microbatches of an optimizer step each) for one data-parallel rank.

    In a stream opened for one pass, the packs after the last sample hold only fillers, which are samples that do not
    count.
    """

    @property
    def facts(self) -> State:
        """Facts about the data, such as ``vocab_size``, ``sequence_length`` or ``unigram_entropy``; equal on all ranks.

        ``samples`` is the number of samples of an epoch, if there are epochs: a job with ``epochs`` needs it. ``rows``
        is the number of rows in one pass; a stream that has it can make one pass.
        """
        ...

    def next_pack(self) -> Pack:
        """Next pack: the microbatches of the next optimizer step, as CPU tensors."""
        ...

    def state(self) -> State:
        """Position of the stream: after it is loaded, :meth:`next_pack` returns exactly the packs not yet taken."""
        ...

    def load_state(self, state: State) -> None:
        """Continue at the position ``state``.

        Raises:
            DataError: the state belongs to other data.
        """
        ...

    def save_assets(self, directory: Path) -> None:
        """Write files of the data that an exported model needs, such as tokenizer files."""
        ...


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """Lengths of a dataset's microbatches: the number of positions of their samples, padding included.

    Attributes:
        multiple: divisor of the length of every microbatch.
        most: upper bound of the lengths; ``None`` if it depends on the data.
        texts: number of texts per sample; each text is a row of the microbatch.
    """

    multiple: int
    most: int | None = None
    texts: int = 1

    @property
    def fixed(self) -> int | None:
        """Common length of all microbatches; ``None`` if lengths may differ."""
        return self.most if self.most == self.multiple else None


@runtime_checkable
class StatesLengths(Protocol):
    """Config of a dataset that states microbatch lengths, so that a bad layout is refused before data is read."""

    @property
    def sample_lengths(self) -> SampleLengths | None:
        """Lengths of microbatches; ``None`` if they depend on the data."""
        ...


def sample_lengths(dataset: object) -> SampleLengths | None:
    """Lengths of a dataset's microbatches, from its config; ``None`` if the config does not state them."""
    return dataset.sample_lengths if isinstance(dataset, StatesLengths) else None


@runtime_checkable
class ChoosesTensors(Protocol):
    """Config of a dataset whose fields decide which tensors a microbatch has; replaces its record's ``gives``."""

    @property
    def gives(self) -> Mapping[str, int]:
        """Names of the tensors in every microbatch -> number of dimensions."""
        ...


@runtime_checkable
class PacksDocuments(Protocol):
    """Config of a dataset that states whether samples hold several documents, so that suitable kernels are chosen."""

    @property
    def packs_documents(self) -> bool | None:
        """Whether samples hold several documents; false if each holds one document and padding.

        ``None`` if this depends on the data.
        """
        ...


def packs_documents(*datasets: object) -> bool | None:
    """Whether samples of any of these datasets hold several documents; ``None`` if unknown.

    Args:
        datasets: configs of datasets.
    """
    answers = [dataset.packs_documents if isinstance(dataset, PacksDocuments) else None for dataset in datasets]
    return True if True in answers else None if None in answers else False
