"""Thread that makes rows from model outputs and writes them, in parallel to the computation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch
from d9d_core.errors import BuildError, NonFiniteError
from d9d_core.inference import ROW, Columns, InferenceTask
from torch import Tensor

from d9d_inference.part_store import PartStore

#: Name, among the tensors that a task keeps, of the tensor with the index of each sample's first row.
ROWS = "rows"
#: Number of batches that may wait to be written before the computation waits.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class KeptPack:
    """Tensors that the task keeps of this rank's share of a pack, which is one batch of ``batch.size`` samples.

    Attributes:
        first: index in the dataset of the share's first sample.
        samples: number of real samples in the share, without samples that only fill up the last batch.
        microbatches: kept tensors of each microbatch; in host memory once ``copied`` has passed.
        copied: event after the copies; ``None`` on a CPU.
    """

    first: int
    samples: int
    microbatches: Sequence[Mapping[str, Tensor]]
    copied: torch.Event | None


class RowThread:
    """Thread that writes the rows of packs in order. As a context manager, it ends with the block.

    Args:
        task: task that makes rows of kept tensors.
        store: storage of the rows.
        nonfinite: whether a NaN or infinity in a row is an error.
    """

    def __init__(self, task: InferenceTask, store: PartStore, nonfinite: Literal["error", "keep"]) -> None:
        self._task = task
        self._store = store
        self._nonfinite = nonfinite
        self._waiting: queue.Queue[KeptPack | None] = queue.Queue(_AHEAD)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="d9d-rows", daemon=True)

    def put(self, pack: KeptPack) -> None:
        """Queue a pack; waits while two earlier packs are queued.

        Raises:
            Exception: writing an earlier pack failed with this exception.
        """
        self.check()
        self._waiting.put(pack)

    def check(self) -> None:
        """Raise the exception with which writing an earlier pack failed, if any failed."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until all rows are written.

        Raises:
            Exception: writing a pack failed with this exception.
        """
        self._waiting.join()
        self.check()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (pack := self._waiting.get()) is not None:
            try:
                if self._failure is None:
                    self._write(pack)
            except BaseException as error:  # raised again by `check`
                self._failure = error
            finally:
                self._waiting.task_done()

    def _write(self, pack: KeptPack) -> None:
        if pack.copied is not None:
            pack.copied.synchronize()
        rows = joined_rows(self._task, pack.microbatches)
        if self._nonfinite == "error":
            check_finite(rows)
        self._store.write(pack.first, pack.samples, rows, self._task.tally(rows))


def joined_rows(task: InferenceTask, microbatches: Sequence[Mapping[str, Tensor]]) -> Columns:
    """Make the rows of several microbatches, without rows of mere fillers (row number -1), in order of the numbers.

    Raises:
        BuildError: the task returned other columns than it declares, or columns of different lengths.
    """
    names = list(task.columns)
    columns: dict[str, list[object]] = {name: [] for name in names}
    for kept in microbatches:
        real = kept[ROWS] >= 0
        if not real.any():
            continue
        rows = task.rows({name: tensor[real] for name, tensor in kept.items()})
        sizes = {name: len(values) for name, values in rows.items()}
        if list(rows) != names or len(set(sizes.values())) != 1:
            raise BuildError(
                f"task: {type(task).__name__}.rows() returned the columns {sizes}; it declares {', '.join(names)}, "
                "each with one value per row"
            )
        for name, values in rows.items():
            columns[name] += list(values)
    order = np.argsort(np.asarray(columns[ROW], dtype=np.int64), kind="stable").tolist()
    return {name: [values[index] for index in order] for name, values in columns.items()}


def check_finite(rows: Columns) -> None:
    """Check that no row has NaN or infinity.

    Raises:
        NonFiniteError: a row has NaN or infinity; the text names the row.
    """
    for name, values in rows.items():
        for row, value in zip(rows[ROW], values, strict=True):
            if isinstance(value, float | np.ndarray | np.floating | list) and not _is_finite(value):
                raise NonFiniteError(
                    f"row {row}: '{name}' has NaN or infinity; check the model and its number format, or write such "
                    "rows unchanged with 'nonfinite: keep'"
                )


def _is_finite(value: object) -> bool:
    array = np.asarray(value)
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())
