"""Log of a run for tasks and subscribers: values at the present step, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from d9d_core.protocols.metric import Table
from d9d_core.protocols.tracker import Histogram

if TYPE_CHECKING:
    from torch import Tensor


class RunLog(Protocol):
    """Log of a run, which all its trackers get, each as far as it takes such values.

    Values belong to the present step: the one whose forward and backward run now, or the last one between two steps.
    Tensors may be on the device. They are copied when they are logged, and reach the trackers some steps later, when
    the copy is done; nothing waits for the device, and the tensors may change at once. Nothing is kept on ranks other
    than the first, which has the trackers: what shall be about all ranks is to be reduced before.

    A name is taken once in a step for each kind and tags; of several values, trackers may keep any. With tags, such as
    ``{"stage": "train"}``, trackers that know none join them to the name: ``train/loss``.
    """

    def scalar(self, name: str, value: float | Tensor, tags: Mapping[str, str] | None = None) -> None:
        """Log a number, or a tensor with one element.

        Raises:
            ValueError: it has more than one element.
        """
        ...

    def histogram(self, name: str, value: Histogram, tags: Mapping[str, str] | None = None) -> None:
        """Log a histogram."""
        ...

    def text(self, name: str, value: str, tags: Mapping[str, str] | None = None) -> None:
        """Log a text."""
        ...

    def picture(self, name: str, value: Tensor, tags: Mapping[str, str] | None = None) -> None:
        """Log a picture: uint8 [height, width, 3], red, green and blue.

        Raises:
            ValueError: it has another shape or dtype.
        """
        ...

    def table(self, name: str, value: Table, tags: Mapping[str, str] | None = None) -> None:
        """Log a table."""
        ...

    def file(self, name: str, path: Path, tags: Mapping[str, str] | None = None) -> None:
        """Log a file. Trackers read it later, in threads of theirs: it stays as it is until the run ends.

        Raises:
            ValueError: there is no such file.
        """
        ...


@runtime_checkable
class LogsValues(Protocol):
    """Task that logs values of its own."""

    def take_log(self, log: RunLog) -> None:
        """Keep the log for later; called once, before training starts, on all ranks."""
        ...
