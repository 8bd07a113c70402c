"""Metrics of a job as one object: updated in the forward, logged, saved and merged together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.metric import Metric, StageMetric, Table, Vector
from d9d_core.tensors import wide_dtype
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.distributed.packed_reduction import PackedReduction

__all__ = ["Statistics"]

#: Series that the loop itself logs.
_TAKEN = ("finite", "stop", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "skipped_steps", "mfu")


def _is_taken(series: str) -> bool:
    return series in _TAKEN or series.startswith(("loss/", "eval/", "memory/"))


class Statistics:
    """Metrics of a job as one object: updated in a step's forward, logged, saved and merged together.

    States of all metrics are merged together, with one all-reduce for each operation and dtype. On a GPU this, and all
    that is computed of merged states, may run on a stream of its own, beside the following steps, for nothing but the
    log reads it. Only the copies into the buffers are made by the stream of the step, because the next update may write
    into a state. The communicator is the one that the step uses too: its collectives run in the order in which the
    hosts issue them, which is the same on all ranks, whatever the stream. A communicator of its own would take device
    memory, and gain nothing for a reduction that begins as soon as it is issued.

    Args:
        metrics: by a name that is unique within the job.
        gated: undo the updates of a step that was not finite; costs a few kernels per metric and step.
        group: the ranks that see other samples, or other parts of them, or have other stages of the model; ``None`` if
            there are none. A state that was never updated changes nothing when it is merged.
        device: where merged states are.
        twins: a second instance of each metric, for a stream of its own: they are never updated, and compute the values
            of merged states. One that does not take the tensors it loads where they are is left out after its first
            values. Without twins, nothing runs beside the step.
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
        self._stream = torch.Stream(device) if self._twins and device is not None else None

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def tallied(self) -> bool:
        """Whether a metric reads what modules tally."""
        return any(isinstance(metric, StageMetric) for metric in self._metrics.values())

    def attach(self, stage: nn.Module) -> None:
        """Show the full model to the metrics that want to know it; before their states are loaded."""
        for metric in (*self._metrics.values(), *self._twins.values()):
            if isinstance(metric, StageMetric):
                metric.attach(stage)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Make the stream of merged states the current one, if there is one; it waits for the present one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def begin(self) -> None:
        """Begin a step."""
        if self._gated:
            copies = {n: {k: t.clone() for k, t in metric.state().items()} for n, metric in self._metrics.items()}
            self._before = copies

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Take in what the task observes in one microbatch."""
        for metric in self._metrics.values():
            if not isinstance(metric, StageMetric):
                metric.update(observations)

    def tally(self, counted: Mapping[str, Tensor]) -> None:
        """Take in what the modules of one stage tallied in one microbatch."""
        for metric in self._metrics.values():
            if isinstance(metric, StageMetric):
                metric.update(counted)

    def settle(self, finite: Tensor) -> None:
        """Settle a step: if it was not finite, it counts in no statistic. Decided on the device."""
        for name, before in self._before.items():
            after = self._metrics[name].state()
            if after.keys() != before.keys():
                raise BuildError(
                    f"metric '{name}' changes the names of its state; they must be the same from the start"
                )
            kept = {k: torch.where(finite, t, before[k].to(t.device, non_blocking=True)) for k, t in after.items()}
            self._metrics[name].load_state(kept)
        self._before = {}

    def compute(self) -> dict[str, Tensor | Table]:
        """Values since the last reset: series -> 0-d value or table; a taken name gets the metric's own in front.

        1-D values become a series each. Where there is a stream of its own, the values must be read in :meth:`beside`.
        Collective over the group.

        Raises:
            BuildError: a metric computes something else than values by name.
        """
        if self._group is None:
            computed: dict[str, Any] = {name: metric.compute() for name, metric in self._metrics.items()}
        else:
            packed = self._packed()
            with self.beside():
                merged = self._reduced(packed)
                for name, twin in self._twins.items():
                    twin.load_state(merged[name])
                strangers = [name for name, twin in self._twins.items() if _elsewhere(twin.state(), merged[name])]
                self._twins = {name: twin for name, twin in self._twins.items() if name not in strangers}
                of_twins = {name: twin.compute() for name, twin in self._twins.items()}
            if self._stream is not None and len(of_twins) < len(self._metrics):
                torch.accelerator.current_stream(self._device).wait_stream(self._stream)
            computed = {
                name: of_twins[name] if name in of_twins else _computed(metric, merged[name])
                for name, metric in self._metrics.items()
            }
        with self.beside():
            expanded = {name: _expanded(name, values) for name, values in computed.items()}
        series = [key for values in expanded.values() for key in values]
        return {
            key if series.count(key) == 1 and not _is_taken(key) else f"{name}/{key}": value
            for name, values in expanded.items()
            for key, value in values.items()
        }

    def reset(self) -> None:
        """Begin a new period."""
        for metric in self._metrics.values():
            metric.reset()

    def tensors(self) -> dict[str, Tensor]:
        """Merged state of all metrics, ``"<metric>/<name>"`` -> tensor, equal on all ranks.

        From then on the first rank carries it and the others begin anew, as they do after a load: so a resumed run
        adds up the same numbers in the same order. Collective over the group.
        """
        if self._group is None:
            merged = {name: metric.state() for name, metric in self._metrics.items()}
        else:
            # A file takes no views of one buffer.
            reduced = self._reduced(self._packed())
            merged = {name: {key: t.clone() for key, t in of.items()} for name, of in reduced.items()}
        for name, metric in self._metrics.items():
            self._take(metric, merged[name])
        return {f"{name}/{key}": tensor for name, of in merged.items() for key, tensor in of.items()}

    def load(self, known: Callable[[str, Mapping[str, Tensor]], bool]) -> list[str]:
        """Continue each metric from a saved state.

        Args:
            known: fills the tensors of the named metric from what was saved; false if they do not fit.

        Returns:
            The names of the metrics that start anew, because nothing fitting was saved.
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
        """Merged state of each metric. Collective over the group."""
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
    """Whether a metric copied what it was to load to another device: it loads in place, and was never updated."""
    return any(tensor.device != merged[key].device for key, tensor in state.items())


def _computed(metric: Metric, merged: dict[str, Tensor]) -> Mapping[str, Tensor | Vector | Table]:
    """Values of a merged state; afterwards the metric has its own again."""
    own = {key: tensor.clone() for key, tensor in metric.state().items()}  # it may load in place
    metric.load_state(merged)
    values = metric.compute()
    metric.load_state(own)
    return values


def _expanded(metric: str, values: object) -> dict[str, Tensor | Table]:
    """Values of a metric by series, those of vectors by a series each.

    Raises:
        BuildError: they are something else than values by name.
    """
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise BuildError(f"metric '{metric}': compute() returned a {kind}; return a mapping of names to values")
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
    # Cast together: the log would cast each.
    each = values.to(wide_dtype(values.device)).unbind()
    return {f"{series}/{name}": value for name, value in zip(names, each, strict=True)}
