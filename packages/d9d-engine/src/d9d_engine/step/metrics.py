"""Metrics of a job as one object: updated in the forward, logged, saved and merged together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.protocols.metric import Metric, StageMetric, Table
from torch import Tensor, nn
from torch import distributed as dist

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
#: Series that the loop itself logs.
_TAKEN = ("finite", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "skipped_steps")


def _is_taken(series: str) -> bool:
    return series in _TAKEN or series.startswith(("loss/", "eval/"))


class Statistics:
    """Statistics of a job: all its metrics.

    Args:
        metrics: by a name that is unique within the job.
        gated: undo the updates of a step that was not finite; costs a few kernels per metric and step.
        group: the ranks that see other samples, or other parts of them, or have other stages of the model; ``None`` if
            there are none. A state that was never updated changes nothing when it is merged.
        device: where merged states are.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        gated: bool,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._metrics = dict(metrics)
        self._gated = gated
        self._group = group
        self._device = device
        self._before: dict[str, dict[str, Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def tallied(self) -> bool:
        """Whether a metric reads what modules tally."""
        return any(isinstance(metric, StageMetric) for metric in self._metrics.values())

    def attach(self, stage: nn.Module) -> None:
        """Show the full model to the metrics that want to know it; before their states are loaded."""
        for metric in self._metrics.values():
            if isinstance(metric, StageMetric):
                metric.attach(stage)

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
        """Values since the last reset: series -> value or table; a name that is taken gets the metric's own in front.

        Collective over the group.

        Raises:
            BuildError: a metric computes something else than values by name.
        """
        computed: dict[str, Any] = {name: self._compute(metric) for name, metric in self._metrics.items()}
        for name, values in computed.items():
            if not isinstance(values, Mapping):
                kind = type(values).__name__
                raise BuildError(f"metric '{name}': compute() returned a {kind}; return a mapping of names to values")
        series = [key for values in computed.values() for key in values]
        return {
            key if series.count(key) == 1 and not _is_taken(key) else f"{name}/{key}": value
            for name, values in computed.items()
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
        tensors: dict[str, Tensor] = {}
        for name, metric in self._metrics.items():
            merged = self._merged(metric)
            self._take(metric, merged)
            tensors |= {f"{name}/{key}": tensor for key, tensor in merged.items()}
        return tensors

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

    def _compute(self, metric: Metric) -> Mapping[str, Tensor | Table]:
        if self._group is None:
            return metric.compute()
        own = {key: tensor.clone() for key, tensor in metric.state().items()}  # a metric may load in place
        metric.load_state(self._merged(metric))
        values = metric.compute()
        metric.load_state(own)
        return values

    def _merged(self, metric: Metric) -> dict[str, Tensor]:
        if self._group is None:
            return metric.state()
        # A state that was never updated may be in the host's memory still, as on ranks without the last stage; the copy
        # must not wait for the device.
        state = metric.state()
        merged = {key: tensor.clone().to(self._device, non_blocking=True) for key, tensor in state.items()}
        for key, operation in metric.reductions.items():
            dist.all_reduce(merged[key], _OPERATIONS[operation], self._group)
        return merged

    def _take(self, metric: Metric, merged: Mapping[str, Tensor]) -> None:
        if self._group is None or dist.get_rank(self._group) == 0:
            metric.load_state(dict(merged))
        else:
            metric.reset()
