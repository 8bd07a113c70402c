"""Metrics of a job as one object: updated in the forward, and logged, saved and merged together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from d9d_core.errors import BuildError, D9dError
from d9d_core.metric import Metric, StageMetric, Table, Vector
from d9d_core.tensors import wide_dtype
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.distributed.packed_reduction import PackedReduction

__all__ = ["Statistics"]

_Merge = Callable[[Tensor, Tensor], Tensor]
_MERGES: Mapping[str, _Merge] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
#: Names of the series that the training loop itself logs, so that metrics cannot use them without a prefix.
_TAKEN = ("finite", "stop", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "skipped_steps", "mfu")


def _is_reserved(series: str) -> bool:
    return series in _TAKEN or series.startswith(("loss/", "eval/", "memory/"))


class Statistics:
    """Metrics of a job as one object: updated in a step's forward, and logged, saved and merged together.

    The states of all metrics are merged with one all-reduce for each operation and dtype. On a GPU, merging and the
    computation of values may run on a separate stream in parallel to the following steps, because only the log reads
    the results. Copies into the buffers are made on the step's stream, as the next update may change a state. The
    communicator is shared with the step: its collectives run in the order in which hosts launch them, the same on all
    ranks. A separate communicator would take device memory without a gain.

    Args:
        metrics: name of a metric, unique within the job -> metric.
        gated: whether to undo the updates of non-finite steps; costs a few kernels per metric and step.
        group: process group of the ranks with other samples, other positions of the same samples, or other stages;
            ``None`` for a single rank. A state without updates does not change the merged state.
        device: device of merged states.
        twins: second instances of the metrics, for the separate stream: they are never updated, and compute values
            from merged states. A twin that copies loaded tensors to another device is dropped at the first merge.
            Without twins, all work runs on the step's stream.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        gated: bool,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        twins: Mapping[str, Metric] | None = None,
    ) -> None:
        self._metrics = dict(metrics)
        self._twins = dict(twins or {})
        self._gated = gated
        self._group = group
        self._device = device
        self._before: dict[str, dict[str, Tensor]] = {}
        self._aside: dict[str, dict[str, Tensor]] = {}
        self._stream = torch.Stream(device) if self._twins and device is not None else None

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def tallied(self) -> bool:
        """Whether a metric reads tallies of modules."""
        return any(isinstance(metric, StageMetric) for metric in self._metrics.values())

    def attach(self, stage: nn.Module) -> None:
        """Pass the full model to metrics that use it; call this before states are loaded."""
        for metric in (*self._metrics.values(), *self._twins.values()):
            if isinstance(metric, StageMetric):
                metric.attach(stage)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Make the separate stream, if there is one, current inside the block; it first waits for the outer stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def begin(self) -> None:
        """Begin a step: copy states if updates may have to be undone."""
        if self._gated:
            copies = {n: {k: t.clone() for k, t in metric.state().items()} for n, metric in self._metrics.items()}
            self._before = copies

    def set_aside(self) -> None:
        """Set all states aside, so that the metrics hold only the updates of the attempt that follows."""
        self._aside = {n: {k: t.clone() for k, t in metric.state().items()} for n, metric in self._metrics.items()}
        self.reset()

    def updates(self) -> PackedReduction:
        """Copies of the updates since :meth:`set_aside`, to be reduced over replicas of the run."""
        return self._packed()

    def merge(self, updates: PackedReduction) -> None:
        """Merge reduced updates into the states that were set aside."""
        for name, metric in self._metrics.items():
            merged = {}
            for key, operation in metric.reductions.items():
                new = updates.view(f"{name}/{key}")
                merged[key] = _MERGES[operation](self._aside[name][key].to(new.device, non_blocking=True), new)
            metric.load_state(merged)
        self._aside = {}

    def take_back(self) -> None:
        """Restore the states that were set aside, without the updates since then."""
        for name, metric in self._metrics.items():
            metric.load_state(self._aside[name])
        self._aside = {}

    def own(self) -> dict[str, Tensor]:
        """Copies of this rank's own states, not merged over ranks: ``"<metric>/<name>"`` -> tensor."""
        return {
            f"{name}/{key}": t.clone() for name, metric in self._metrics.items() for key, t in metric.state().items()
        }

    def take_own(self, states: Mapping[str, Tensor]) -> None:
        """Load states from another replica: the result of :meth:`own` on its corresponding rank."""
        for name, metric in self._metrics.items():
            own = {key: states[f"{name}/{key}"].to(t.device) for key, t in metric.state().items()}
            metric.load_state(own)

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Update metrics with the task's observations of one microbatch."""
        for name, metric in self._metrics.items():
            if not isinstance(metric, StageMetric):
                with _named(name, "update"):
                    metric.update(observations)

    def tally(self, counted: Mapping[str, Tensor]) -> None:
        """Update metrics with the tallies of one stage in one microbatch."""
        for name, metric in self._metrics.items():
            if isinstance(metric, StageMetric):
                with _named(name, "update"):
                    metric.update(counted)

    def settle(self, finite: Tensor) -> None:
        """End a step: undo its updates if it was not finite. Decided on the device.

        Raises:
            BuildError: a metric's ``update`` has changed the names in its state.
        """
        for name, before in self._before.items():
            after = self._metrics[name].state()
            if after.keys() != before.keys():
                raise BuildError(
                    f"metric '{name}': update() changed the names in state(); create all states in the constructor"
                )
            kept = {k: torch.where(finite, t, before[k].to(t.device, non_blocking=True)) for k, t in after.items()}
            self._metrics[name].load_state(kept)
        self._before = {}

    def compute(self) -> dict[str, Tensor | Table]:
        """Values since the last reset: series -> 0-d value or table. Collective over the group.

        A name that another metric or the training loop uses gets the metric's name as a prefix. A 1-D value becomes one
        series per element. With a separate stream, values must be read inside :meth:`beside`.

        Raises:
            BuildError: a metric returned no mapping of names to values, or a value of an unsupported type or shape.
        """
        if self._group is None:
            computed: dict[str, Any] = {name: _values(name, metric) for name, metric in self._metrics.items()}
        else:
            packed = self._packed()
            with self.beside():
                merged = self._reduced(packed)
                for name, twin in self._twins.items():
                    twin.load_state(merged[name])
                strangers = [name for name, twin in self._twins.items() if _elsewhere(twin.state(), merged[name])]
                self._twins = {name: twin for name, twin in self._twins.items() if name not in strangers}
                of_twins = {name: _values(name, twin) for name, twin in self._twins.items()}
            if self._stream is not None and len(of_twins) < len(self._metrics):
                torch.accelerator.current_stream(self._device).wait_stream(self._stream)
            computed = {
                name: of_twins[name] if name in of_twins else _computed(name, metric, merged[name])
                for name, metric in self._metrics.items()
            }
        with self.beside():
            expanded = {name: _expanded(name, values) for name, values in computed.items()}
        series = [key for values in expanded.values() for key in values]
        return {
            key if series.count(key) == 1 and not _is_reserved(key) else f"{name}/{key}": value
            for name, values in expanded.items()
            for key, value in values.items()
        }

    def reset(self) -> None:
        """Reset all metrics, at the beginning of a new logging period."""
        for metric in self._metrics.values():
            metric.reset()

    def tensors(self) -> dict[str, Tensor]:
        """Merged state of all metrics, ``"<metric>/<name>"`` -> tensor, equal on all ranks. Collective over the group.

        Afterwards the first rank holds the merged state and the other ranks start from zero, as after a load, so that a
        resumed run adds the same numbers in the same order.
        """
        if self._group is None:
            merged = {name: metric.state() for name, metric in self._metrics.items()}
        else:
            # Clone the tensors, because a file cannot store views of one buffer.
            reduced = self._reduced(self._packed())
            merged = {name: {key: t.clone() for key, t in of.items()} for name, of in reduced.items()}
        for name, metric in self._metrics.items():
            self._take(metric, merged[name])
        return {f"{name}/{key}": tensor for name, of in merged.items() for key, tensor in of.items()}

    def load(self, known: Callable[[str, Mapping[str, Tensor]], bool]) -> list[str]:
        """Restore each metric from a saved state.

        Args:
            known: fills the tensors of the named metric from the saved state; returns false if they do not fit.

        Returns:
            Names of the metrics without a fitting saved state.
        """
        anew = []
        for name, metric in self._metrics.items():
            state = metric.state()
            if known(name, state):
                self._take(metric, state)
            else:
                anew.append(name)
        return anew

    def _packed(self) -> PackedReduction:
        tensors, operations = {}, {}
        for name, metric in self._metrics.items():
            state = metric.state()
            for key, operation in metric.reductions.items():
                tensors[f"{name}/{key}"], operations[f"{name}/{key}"] = state[key], operation
        return PackedReduction.of(tensors, operations, self._device)

    def _reduced(self, packed: PackedReduction) -> dict[str, dict[str, Tensor]]:
        """Merge the state of each metric. Collective over the group."""
        assert self._group is not None
        if self._stream is not None:
            for buffer in packed.buffers.values():
                buffer.record_stream(torch.accelerator.current_stream(self._device))
        merged = packed.reduce(self._group)
        return {
            name: {key: merged[f"{name}/{key}"] for key in metric.reductions} for name, metric in self._metrics.items()
        }

    def _take(self, metric: Metric, merged: Mapping[str, Tensor]) -> None:
        if self._group is None or dist.get_rank(self._group) == 0:
            metric.load_state(dict(merged))
        else:
            metric.reset()


def _elsewhere(state: Mapping[str, Tensor], merged: Mapping[str, Tensor]) -> bool:
    """Whether a metric's ``load_state`` copied the state into its existing tensors on another device."""
    return any(tensor.device != merged[key].device for key, tensor in state.items())


@contextmanager
def _named(metric: str, method: str) -> Iterator[None]:
    """Add the names of the metric and its method to an exception raised inside the block."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, D9dError):  # a D9dError names its own place
            error.add_note(f"raised in {method}() of metric '{metric}'")
        raise


def _values(name: str, metric: Metric) -> Mapping[str, Tensor | Vector | Table]:
    with _named(name, "compute"):
        return metric.compute()


def _computed(name: str, metric: Metric, merged: dict[str, Tensor]) -> Mapping[str, Tensor | Vector | Table]:
    """Compute a metric's values from a merged state, and restore the metric's own state."""
    own = {key: tensor.clone() for key, tensor in metric.state().items()}  # the metric may load in place
    metric.load_state(merged)
    values = _values(name, metric)
    metric.load_state(own)
    return values


def _expanded(metric: str, values: object) -> dict[str, Tensor | Table]:
    """Values of a metric by series; a vector becomes one series per element.

    Raises:
        BuildError: the values are no mapping of names to values, or a value has an unsupported type or shape.
    """
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise BuildError(f"metric '{metric}': compute() returned a {kind}; return a mapping of names to tensors")
    found: dict[str, Tensor | Table] = {}
    for series, value in values.items():
        if isinstance(value, Vector):
            found |= _series(series, value.values, value.names)
        elif isinstance(value, Tensor) and value.ndim == 1:
            found |= _series(series, value, tuple(map(str, range(len(value)))))
        elif isinstance(value, Table) or (isinstance(value, Tensor) and value.ndim == 0):
            found[series] = value
        else:
            kind = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise BuildError(
                f"metric '{metric}': compute() returned a {kind} as '{series}'; return a 0-d or 1-D tensor, a Vector "
                "or a Table"
            )
    return found


def _series(series: str, values: Tensor, names: tuple[str, ...]) -> dict[str, Tensor | Table]:
    # Cast all values at once, because the log would cast each value.
    each = values.to(wide_dtype(values.device)).unbind()
    return {f"{series}/{name}": value for name, value in zip(names, each, strict=True)}
