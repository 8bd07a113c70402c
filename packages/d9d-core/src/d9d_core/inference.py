"""Inference: tasks that turn a model's outputs into rows, and writers of these rows.

Start here: :class:`InferenceTask` makes rows of outputs, a :class:`Writer` makes files of rows::

    import json

    class JsonLines:
        suffix = ".jsonl"

        def __init__(self, config): ...

        def write(self, path, rows):
            with path.open("w") as file:
                for values in zip(*rows.values()):
                    print(json.dumps(dict(zip(rows, values))), file=file)

        def join(self, parts, path):
            with path.open("wb") as file:
                for part in parts:
                    file.write(part.read_bytes())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from d9d_core.data import TextInputs
from d9d_core.task import SplitsPositions, StageInputs
from d9d_core.types import Microbatch, State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ROW", "Columns", "Continuation", "ContinuesRows", "InferenceTask", "JoinsPositions", "ReadsModules", "ReadsTexts",
    "Writer", "WritesText",
]  # fmt: skip

#: Rows of a table by column: name -> one value for each row. Values are what JSON can hold, or lists of numbers.
Columns = Mapping[str, Sequence[Any]]
#: Column that every inference task fills: the number of the row in the input, from 0.
ROW = "row"


class InferenceTask(Protocol):
    """Inference task: from a microbatch to model inputs, and from outputs to rows.

    It keeps nothing from one microbatch to the next, so that a run continues after a kill on any number of ranks: what
    is to be known over all rows are sums (:meth:`tally`), which the engine adds up and saves with the rows.
    """

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of the output, in order: name -> what a value is. The first one is ``row``."""
        ...

    def check(self, model: Any, facts: State) -> None:
        """Compare the model's config with the facts of the data, before anything is computed.

        Args:
            model: its config.
            facts: what the data stream knows of itself; nothing while a job is planned.

        Raises:
            D9dError: they do not go together, for example a model without the head that the task reads.
        """
        ...

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Keyword arguments of the model for this microbatch."""
        ...

    def process(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Tensors to keep of a microbatch, by name: on its device, [B, ...] each, where B samples come in.

        All else is freed at once. Nothing here may wait for the device.
        """
        ...

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Rows of what was kept of a microbatch, now in the host's memory; called in a thread beside the computation.

        Args:
            kept: samples that are no fillers, [b, ...] each; ``rows`` int64 [b] among them is the number of the first
                row of each sample (see :attr:`d9d_core.data.DataContext.one_pass`).
        """
        ...

    def tally(self, rows: Columns) -> Mapping[str, float]:
        """Sums over these rows that :meth:`finalize` needs; always of the same names."""
        ...

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Values over all rows, by name, of the sums over all rows; shown at the end and saved beside the rows."""
        ...


@runtime_checkable
class ReadsModules(Protocol):
    """Optional side of an :class:`InferenceTask`: it reads what modules inside of the model return.

    :meth:`InferenceTask.process` finds them among the outputs, as ``module/<name>``, wherever their stage runs.
    """

    def modules(self, names: Sequence[str]) -> Sequence[str]:
        """Names of the modules to read, of all names in the full model. Each returns a tensor.

        Raises:
            D9dError: the model has no such modules.
        """
        ...


@runtime_checkable
class ReadsTexts(Protocol):
    """Optional side of an :class:`InferenceTask`: its head is trained with these tokens of a text as inputs."""

    @property
    def text_inputs(self) -> TextInputs:
        """Tokens of a text that are inputs, which the dataset is asked for.

        See :attr:`d9d_core.data.DataContext.inputs`.
        """
        ...


@runtime_checkable
class JoinsPositions(SplitsPositions, Protocol):
    """Optional side of an :class:`InferenceTask`: ranks of ``cp`` compute their own positions of each sample.

    :meth:`InferenceTask.inputs` and :meth:`InferenceTask.process` get a rank's part of a microbatch, and
    :meth:`InferenceTask.rows` what is kept of whole samples, on one of these ranks.
    """

    @property
    def of_positions(self) -> frozenset[str]:
        """Names of what is kept of positions, [B, S / R, ...] on each of R ranks; all else is the same on all."""
        ...


@dataclass(frozen=True, slots=True)
class Continuation:
    """Continuation of token sequences, one token after the other.

    Attributes:
        max_new_tokens: most tokens of a continuation.
        temperature: divides the logits before a token is drawn; 0 takes the most probable one.
        seed: of the draws, which depend on it, on the number of the row and on that of the new token alone.
        stop: tokens that end a sequence; ``None`` for those that end a text of the model and its data.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] | None = None


@runtime_checkable
class ContinuesRows(Protocol):
    """Optional side of an :class:`InferenceTask`: the model continues each sample before :meth:`InferenceTask.process`.

    That takes a forward for each new token. Each sample is one sequence, ``tokens`` [B, S] of which ``lengths`` [B] are
    no padding. :meth:`InferenceTask.inputs` gets these two alone, with the new tokens so far.
    :meth:`InferenceTask.process` gets the microbatch of the data, and as outputs ``new_tokens`` int64
    [B, max_new_tokens], -1 behind the last, and ``ended`` bool [B], whether that is one of those that end a sequence.
    """

    @property
    def continuation(self) -> Continuation:
        """Length of the continuations, and choice of their tokens."""
        ...

    def logits(self, outputs: Mapping[str, Tensor]) -> Tensor | None:
        """Logits [B, S, V] among the outputs of the model; ``None`` if it gives none, which is an error everywhere."""
        ...


@runtime_checkable
class WritesText(Protocol):
    """Optional side of an :class:`InferenceTask`: it writes token ids as text."""

    def use_text_of(self, text_of: Callable[[Sequence[int]], str] | None) -> None:
        """Take what makes a text of token ids, without special tokens, before the first row.

        Args:
            text_of: of the tokenizer of the data or of the weights; ``None`` where there is none. It may be called in
                another thread.
        """
        ...


class Writer(Protocol):
    """Writer of a file format, for the output of inference jobs.

    Rows arrive in parts, from any rank and in any order; whole parts are joined in order when all rows are there. So
    what was written survives a kill.
    """

    @property
    def suffix(self) -> str:
        """Suffix of its files, with the dot."""
        ...

    def write(self, path: Path, rows: Columns) -> None:
        """Write a part: a file of its own, with at least one row. Equal rows make equal bytes."""
        ...

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Join parts, in this order, to one file, without holding more than one part in memory."""
        ...
