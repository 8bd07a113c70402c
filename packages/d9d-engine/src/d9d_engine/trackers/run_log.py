"""Log of a run for tasks and subscribers, which forwards values to the tracker hub."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from d9d_core.metric import Table
from d9d_core.registry.entries import shown
from d9d_core.tensors import is_dtensor, wide_dtype
from d9d_core.tracker import Histogram, SeriesName
from torch import Tensor

from d9d_engine.trackers.hub import TrackerHub


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    kind: str  # name of the hub's method for this kind
    name: str
    tensors: tuple[Tensor, ...]  # on the host once `copied` has passed
    copied: torch.Event | None
    read: Callable[..., Any]  # makes the hub's value from the tensors


class HubLog:
    """Log of a run (:class:`d9d_core.tracker.RunLog`) that forwards values to the trackers once they are on the host.

    Args:
        hub: trackers; without any, such as on other ranks than the first, no values are copied.
        step: returns the current step, 1-based; see :meth:`follow`.
        lag: number of steps after which values are forwarded; by then, the device has copied them.
    """

    def __init__(self, hub: TrackerHub, step: Callable[[], int], lag: int) -> None:
        self._hub = hub
        self._step = step
        self._lag = lag
        self._pending: deque[_Entry] = deque()

    def follow(self, step: Callable[[], int]) -> None:
        """Replace the function that returns the current step."""
        self._step = step

    def scalar(self, name: str, value: float | Tensor, tags: Mapping[str, str] | None = None) -> None:
        """Log a number, or a tensor with one element.

        Raises:
            ValueError: the value is no number, or has more than one element.
        """
        if isinstance(value, Tensor):
            self._keep("write", name, tags, [_single(f"scalar '{name}'", value)], _number)
        else:
            self._keep("write", name, tags, [], partial(float, _as_float(f"scalar '{name}'", value)))

    def histogram(self, name: str, value: Histogram, tags: Mapping[str, str] | None = None) -> None:
        """Log a histogram.

        Raises:
            ValueError: the value is no histogram, or a bound is no single number.
        """
        _check_type(f"histogram '{name}'", value, Histogram)
        counts = _real(f"counts of histogram '{name}'", value.counts)
        bounds = [
            _single(what, bound)
            if isinstance(bound, Tensor)
            else torch.tensor(_as_float(what, bound), dtype=torch.float64)
            for what, bound in ((f"{side} of histogram '{name}'", getattr(value, side)) for side in ("low", "high"))
        ]
        self._keep("write_histograms", name, tags, [counts, *bounds], _histogram)

    def text(self, name: str, value: str, tags: Mapping[str, str] | None = None) -> None:
        """Log a text; another object is converted by ``str`` at once."""
        self._keep("write_texts", name, tags, [], partial(str, str(value)))

    def picture(self, name: str, value: Tensor, tags: Mapping[str, str] | None = None) -> None:
        """Log a picture: uint8 [height, width, 3].

        Raises:
            ValueError: the tensor has another shape or dtype.
        """
        _check_type(f"picture '{name}'", value, Tensor)
        if value.ndim != 3 or value.shape[2] != 3 or value.dtype != torch.uint8 or not value.numel():
            raise ValueError(f"picture '{name}' is {value.dtype} {list(value.shape)}; log uint8 [height, width, 3]")
        self._keep("write_pictures", name, tags, [value], lambda picture: picture)

    def table(self, name: str, value: Table, tags: Mapping[str, str] | None = None) -> None:
        """Log a table.

        Raises:
            ValueError: the value is no table.
        """
        _check_type(f"table '{name}'", value, Table)
        _check_type(f"values of table '{name}'", value.values, Tensor)
        self._keep("write_tables", name, tags, [value.values], lambda values: replace(value, values=values))

    def file(self, name: str, path: Path, tags: Mapping[str, str] | None = None) -> None:
        """Log a file, which must not change until the run ends.

        Raises:
            ValueError: the file does not exist.
        """
        path = Path(path).absolute()
        if not path.is_file():
            raise ValueError(f"file '{name}': {path} is no file; write the file before logging it")
        self._keep("write_files", name, tags, [], lambda: path)

    def deliver(self) -> None:
        """Forward values that are old enough to be on the host, without waiting."""
        step = self._step() - self._lag
        while self._pending and self._pending[0].step <= step:
            self._hand_over(self._pending[0].step)

    def drain(self) -> None:
        """Wait for all values and forward them."""
        while self._pending:
            self._hand_over(self._pending[0].step)

    def _keep(
        self,
        kind: str,
        name: str,
        tags: Mapping[str, str] | None,
        tensors: list[Tensor],
        read: Callable[..., Any],
    ) -> None:
        # Raise on all ranks, also on ranks without trackers, which would otherwise wait for the first rank.
        if not isinstance(name, str) or not all(isinstance(text, str) for tag in (tags or {}).items() for text in tag):
            raise ValueError(
                f"a value was logged as {shown(name)} with tags {shown(tags)}; the name and the tags must be strings"
            )
        if any(map(is_dtensor, tensors)):
            raise ValueError(f"'{name}' is a DTensor; call full_tensor() on all ranks, and log the result")
        if self._hub.is_empty:
            return
        copies = tuple(_host_copy(tensor) for tensor in tensors)
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        copied = None
        if device is not None:
            copied = torch.Event(device)
            copied.record()
        self._pending.append(_Entry(self._step(), kind, SeriesName(name, tags) if tags else name, copies, copied, read))

    def _hand_over(self, step: int) -> None:
        """Forward all entries of one step, grouped by kind."""
        entries = []
        while self._pending and self._pending[0].step == step:
            entry = self._pending.popleft()
            if entry.copied is not None:
                entry.copied.synchronize()
            entries.append(entry)
        for kind, group in groupby(sorted(entries, key=lambda entry: entry.kind), key=lambda entry: entry.kind):
            values = {entry.name: entry.read(*entry.tensors) for entry in group}
            getattr(self._hub, kind)(step, values)


def _check_type(what: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):  # ValueError for all values that cannot be logged
        raise ValueError(f"{what} is a {type(value).__name__}; log a {kind.__name__}")  # noqa: TRY004


def _real(what: str, value: Tensor) -> Tensor:
    """Convert a value of any real dtype to a wide float dtype."""
    _check_type(what, value, Tensor)
    if value.is_complex():
        raise ValueError(f"{what} is complex; log its real and imaginary part")
    if value.is_meta:
        raise ValueError(f"{what} has no value: it is on the device 'meta'")
    return value.detach().to(wide_dtype(value.device))


def _single(what: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ValueError(f"{what} has shape {list(value.shape)}; log a single value, or a histogram")
    return _real(what, value)


def _as_float(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} is {shown(value)}, which is no number: {error}; log a number") from error


def _host_copy(value: Tensor) -> Tensor:
    """Copy to host memory; a copy from a device runs asynchronously."""
    value = value.detach()
    if value.device.type == "cpu":
        return value.clone()
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


def _number(value: Tensor) -> float:
    return float(value.item())


def _histogram(counts: Tensor, low: Tensor, high: Tensor) -> Histogram:
    return Histogram(counts, _number(low), _number(high))
