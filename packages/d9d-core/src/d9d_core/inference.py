"""Inference: tasks that turn a model's outputs into rows, and writers of these rows.

Start here: an :class:`InferenceTask` converts a model's outputs to rows, a :class:`Writer` writes rows to files::

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

#: Rows of a table by column: name -> one value per row. Values are JSON values or lists of numbers.
Columns = Mapping[str, Sequence[Any]]
#: Column that every inference task fills: index of the row in the input, from 0.
ROW = "row"


class InferenceTask(Protocol):
    """Inference task: converts microbatches to model inputs, and outputs to rows.

    A task keeps no state between microbatches, so that a run can continue after a kill on any number of ranks.
    Statistics over all rows are sums (:meth:`tally`), which the engine adds up and saves with the rows.
    """

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of the output, in order: name -> description of a value. The first one is ``row``."""
        ...

    def check(self, model: Any, facts: State) -> None:
        """Check the model's config against the facts of the data, before anything is computed.

        Args:
            model: config of the model.
            facts: facts of the data stream; empty while a job is planned.

        Raises:
            D9dError: model and data do not fit the task, for example because the model lacks the head that the task
                needs.
        """
        ...

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Keyword arguments of the model for a microbatch."""
        ...

    def process(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Tensors of a microbatch to keep: name -> device tensor [B, ...] for B samples.

        All other outputs are freed at once. The method must not synchronize with the device.
        """
        ...

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make rows of the kept tensors of a microbatch, now in host memory. Called in a thread while forwards run.

        Args:
            kept: tensors [b, ...] of the b real samples, without samples that only fill up the last batch. The tensor
                ``rows`` int64 [b] is the index of each sample's first row (:attr:`d9d_core.data.DataContext.one_pass`).
        """
        ...

    def tally(self, rows: Columns) -> Mapping[str, float]:
        """Sums over ``rows`` from which :meth:`finalize` computes results; their names are the same in every call."""
        ...

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Compute the run's results, such as a mean loss, from the tallied sums over all rows: name -> number.

        The engine prints the results at the end and saves them with the output.
        """
        ...


@runtime_checkable
class ReadsModules(Protocol):
    """Optional protocol of an :class:`InferenceTask` that reads outputs of modules inside the model.

    :meth:`InferenceTask.process` receives them among the outputs as ``module/<name>``, from any pipeline stage.
    """

    def modules(self, names: Sequence[str]) -> Sequence[str]:
        """Names of the modules to read, chosen from all module names of the full model. Each returns a tensor.

        Raises:
            D9dError: the model has no such modules.
        """
        ...


@runtime_checkable
class ReadsTexts(Protocol):
    """Optional protocol of an :class:`InferenceTask` that chooses which tokens of a text are inputs, as in training."""

    @property
    def text_inputs(self) -> TextInputs:
        """Tokens of a text that the dataset must give as inputs, see :attr:`d9d_core.data.DataContext.inputs`."""
        ...


@runtime_checkable
class JoinsPositions(SplitsPositions, Protocol):
    """Optional protocol of an :class:`InferenceTask` that supports context parallelism.

    Each rank of ``cp`` computes some positions of each sample.
    :meth:`InferenceTask.inputs` and :meth:`InferenceTask.process` receive the rank's positions of a microbatch;
    :meth:`InferenceTask.rows` receives the tensors of whole samples, on one rank of ``cp``.
    """

    @property
    def of_positions(self) -> frozenset[str]:
        """Names of kept outputs split over positions, [B, S / R, ...] on R ranks; all other outputs are equal."""
        ...


@dataclass(frozen=True, slots=True)
class Continuation:
    """Settings for the autoregressive continuation of token sequences.

    Attributes:
        max_new_tokens: largest number of new tokens.
        temperature: divisor of the logits before a token is sampled; 0 takes the most probable token.
        seed: seed of the sampling. The random draw of a token depends only on this seed, the index of the row and the
            index of the new token.
        stop: token ids that end a sequence; ``None`` for the end-of-text tokens of the model and the data.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] | None = None


@runtime_checkable
class ContinuesRows(Protocol):
    """Optional protocol of an :class:`InferenceTask`: the model continues samples before :meth:`InferenceTask.process`.

    Each new token takes a forward. A sample is one sequence: ``tokens`` [B, S], of which the first ``lengths`` [B] are
    not padding. :meth:`InferenceTask.inputs` receives only these two tensors, extended by the new tokens so far.
    :meth:`InferenceTask.process` receives the microbatch of the data, and as outputs ``new_tokens`` int64
    [B, max_new_tokens], -1 after the last new token, and ``ended`` bool [B], whether a stop token ended the sequence.
    """

    @property
    def continuation(self) -> Continuation:
        """Number of new tokens, and sampling settings."""
        ...

    def logits(self, outputs: Mapping[str, Tensor]) -> Tensor | None:
        """Logits [B, S, V] from the model's outputs; ``None`` if there are none: then every rank raises an error."""
        ...


@runtime_checkable
class WritesText(Protocol):
    """Optional protocol of an :class:`InferenceTask` that writes token ids as text."""

    def use_text_of(self, text_of: Callable[[Sequence[int]], str] | None) -> None:
        """Receive the function that decodes token ids to text, without special tokens. Called before the first row.

        Args:
            text_of: decoder of the data's or the weights' tokenizer; ``None`` without a tokenizer. It may be called in
                another thread.
        """
        ...


class Writer(Protocol):
    """Writer of a file format, for the output of inference jobs.

    Rows arrive in parts, from any rank and in any order, and each part becomes a file. When all rows are written, the
    parts are joined in order. So rows that are written are not lost if the process is killed.
    """

    @property
    def suffix(self) -> str:
        """Suffix of the format's files, with the dot."""
        ...

    def write(self, path: Path, rows: Columns) -> None:
        """Write rows, at least one, to the file ``path``. Equal rows must give equal bytes."""
        ...

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Concatenate the files ``parts``, in this order, to the file ``path``, with at most one part in memory."""
        ...
