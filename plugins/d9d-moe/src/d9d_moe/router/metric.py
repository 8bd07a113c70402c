"""Metric ``router``: load, balance and entropy of a model's routers.

Shapes: L routers in the order of the model, E experts of the router with the most experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from d9d_core.errors import BuildError, JobError
from d9d_core.metric import Table
from d9d_core.tensors import wide_dtype
from d9d_core.traits import HasTallies, modules_with
from torch import Tensor, nn
from torch.nn import functional

from d9d_moe.router.metric_config import RouterMetricConfig

#: Names of tallies; a module that has all of them is recognised as a router.
_ROUTER = frozenset({"expert_tokens", "tokens", "entropy"})


class RouterMetric:
    """Metric of routers: load, balance violation, entropy and dropped rows since the last reset.

    Series: ``router/entropy``, nats per position, averaged over layers; ``router/max_violation`` and
    ``router/mean_violation``, the maximum and the mean over layers of the excess of the fullest expert
    (``max_i load_i / mean load - 1``: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing", equation 4);
    ``router/dropped``, the fraction of rows dropped because their expert was full, if a router has a capacity. The
    table ``router/load`` [L, E] has each expert's rows relative to a uniform load; NaN after a layer's last expert. The
    values of a layer without tokens, for example after a period of skipped steps, are NaN and left out of averages.

    Args:
        config: config of the metric.
    """

    def __init__(self, config: RouterMetricConfig) -> None:
        self._per_layer = config.per_layer
        self._routers: tuple[str, ...] = ()
        self._limited: frozenset[str] = frozenset()  # routers with a capacity
        self._experts = torch.zeros(0)
        self._state: dict[str, Tensor] = {}
        self._empty = True

    def attach(self, stage: nn.Module) -> None:
        """Find the routers of the full model, which is passed as ``stage``.

        Raises:
            BuildError: the model has no routers.
        """
        tallies = {name: module.tallies() for name, module in modules_with(stage, HasTallies).items()}
        routers = {name: found for name, found in tallies.items() if found.keys() >= _ROUTER}
        if not routers:
            raise BuildError("metric 'router': the model has no routers; remove the metric from 'metrics'")
        self._routers = tuple(routers)
        self._limited = frozenset(name for name, found in routers.items() if "dropped" in found)
        sizes = [found["expert_tokens"].numel() for found in routers.values()]
        self._experts = torch.tensor(sizes).unsqueeze(1)  # [L, 1]
        rows = torch.zeros(len(routers), dtype=torch.int64)
        self._state = {
            "expert_tokens": rows.new_zeros(len(routers), max(sizes)),
            "tokens": rows,
            "entropy": rows.to(torch.float64),
            **({"dropped": rows.clone()} if self._limited else {}),
        }

    @property
    def reductions(self) -> Mapping[str, Literal["sum", "max", "min"]]:
        """Reduction of each state over ranks: sum."""
        return dict.fromkeys(self._state, "sum")

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Add the tallies of one microbatch; a pipeline stage provides the tallies of its own routers.

        Raises:
            JobError: the observations have no tallies of any router.
        """
        device = self._meet(observations)
        width = self._state["expert_tokens"].shape[1]
        for key, total in self._state.items():
            none = torch.zeros((), dtype=total.dtype, device=device)
            rows = [observations.get(f"{router}/{key}", none) for router in self._routers]
            if key == "expert_tokens":
                rows = [functional.pad(row.reshape(-1), (0, width - row.numel())) for row in rows]
            self._state[key] = total + torch.stack(rows).to(total.dtype)
        self._empty = False

    def state(self) -> dict[str, Tensor]:
        """Sums of the tallies since the last reset, [L] or [L, E], by name."""
        return dict(self._state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved or merged sums."""
        self._state = {key: state[key] for key in self._state}
        device = self._state["tokens"].device
        if (
            self._experts.device != device
        ):  # a metric that only loads state gets no tallies, which would tell its device
            self._experts = self._experts.to(device, non_blocking=True)
        self._empty = False

    def compute(self) -> Mapping[str, Tensor | Table]:
        """Compute the series and the table described at the class; empty before the first update."""
        if self._empty:
            return {}
        counts = self._state["expert_tokens"]
        wide = counts.to(wide_dtype(counts.device))
        tokens = self._state["tokens"]
        seen = tokens > 0  # where false, 0 / 0 gives NaN
        load = wide * self._experts / wide.sum(1, keepdim=True)
        violation = load.amax(1) - 1
        entropy = self._state["entropy"] / tokens
        values: dict[str, Tensor | Table] = {
            "router/entropy": entropy.nanmean(),
            "router/max_violation": violation.where(seen, 0).amax() / seen.any(),
            "router/mean_violation": violation.nanmean(),
        }
        layers = {"entropy": entropy, "violation": violation}
        if self._limited:
            dropped = self._state["dropped"]
            routed = counts.sum(1)
            values["router/dropped"] = dropped.sum() / routed.sum()
            layers["dropped"] = dropped / routed
        if self._per_layer:
            values |= {
                f"router/{key}/{router}": value
                for key, of in layers.items()
                for router, value in zip(self._routers, of.unbind(), strict=True)
                if key != "dropped" or router in self._limited
            }
        absent = torch.arange(counts.shape[1], device=counts.device) >= self._experts
        load = load.masked_fill(absent, torch.nan)
        labels = {"row": "layer", "column": "expert", "unit": "load / uniform"}
        return values | {"router/load": Table(load, **labels, neutral=1.0, rows=_short(self._routers))}

    def reset(self) -> None:
        """Set the sums to zero on their device; copying new zeros there would make the host wait for the device."""
        self._state = {key: torch.zeros_like(total) for key, total in self._state.items()}
        self._empty = True

    def _meet(self, observations: Mapping[str, Tensor]) -> torch.device:
        """Move the sums to the device of the observed tallies, and return that device."""
        found = [observations[key] for router in self._routers if (key := f"{router}/expert_tokens") in observations]
        if not found:
            raise JobError(
                f"metric 'router': no tallies of {', '.join(self._routers[:3]) or 'any router'}; attach the metric to "
                "the model, and pass the tallies of its routers"
            )
        device = found[0].device
        if self._experts.device != device:
            self._experts = self._experts.to(device, non_blocking=True)
        if self._state["tokens"].device != device:
            entropy = self._state["entropy"].to(wide_dtype(device))
            self._state = {
                key: total.to(device, non_blocking=True) for key, total in (self._state | {"entropy": entropy}).items()
            }
        return device


def _short(names: Sequence[str]) -> tuple[str, ...]:
    """Shorten names such as ``layers.1.ffn.router`` to ``1``, if they differ only in the one number of each name."""
    split = [name.split(".") for name in names]
    numbers = tuple(part for parts in split for part in parts if part.isdecimal())
    around = {tuple("" if part.isdecimal() else part for part in parts) for parts in split}
    return numbers if len(around) == 1 and len(numbers) == len(names) else tuple(names)
