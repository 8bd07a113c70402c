"""Gradient clipping: global norm, its all-reduce together with the step's other scalars, and scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from d9d_core import events as ev
from d9d_core.events import StepResult
from d9d_core.grid import AXES, Grid
from d9d_core.kernel import OpSlot
from d9d_core.optimizer import DividesGradients, Optimizer
from d9d_core.tensors import is_dtensor, local, wide_dtype
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.distributed.mesh import Topology, place_along
from d9d_engine.step.executor import StageLoss
from d9d_engine.step.loss import on_device
from d9d_engine.subscribers.event_bus import Events


class Clipper:
    """Computes the global gradient norm, reduces the step's scalars, and scales gradients to ``max_norm``.

    Each rank computes the norm of its shard of every gradient. A shard on several ranks is counted by the first of them
    only, so parameters on different meshes, with any sharding, can be combined, unlike in torch's clipping. All scalars
    are reduced in one message (two for the maximum norm), and the host does not wait for the device.

    Args:
        parameters: name -> trained parameter.
        coefficients: loss term -> its coefficient in the total.
        topology: rank, device, meshes and process groups of this process.
        max_norm: largest norm; ``None`` computes the norm without scaling.
        norm: computes the norm of this rank's gradients.
        stop: returns whether this process was asked to stop; called once per step.
        views: parameter -> mesh view over which it is sharded, if any.
        elsewhere: names of tied parameters that another pipeline rank counts.
        apart: axes along which replicas take their own steps; each replica has its own norm, and clips by it.
        divide: called with the divisor of the gradients (0-d float32) and divides them, to save a pass over them; by
            default, the clipper divides.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        coefficients: Mapping[str, float],
        topology: Topology,
        max_norm: float | None,
        norm: GradientNorm,
        stop: Callable[[], bool] = lambda: False,
        views: Mapping[str, str] | None = None,
        elsewhere: Collection[str] = (),
        divide: Callable[[Tensor], None] | None = None,
        apart: Sequence[str] = (),
    ) -> None:
        self._place = place_along(topology, apart)
        self._divide = divide or self._divide_here
        of = views or {}
        own = {name: parameter for name, parameter in parameters.items() if name not in elsewhere}
        self._counted = {name: p for name, p in own.items() if counts(p, topology, of.get(name), apart)}
        self._parameters = tuple(parameters.values())
        self._coefficients = dict(coefficients)
        self._topology = topology
        self._max_norm = max_norm
        self._norm = norm
        self.stop = stop
        # Ranks along tp compute the same loss, so one of them counts; only the last pipeline stage computes the loss.
        self._shares_loss = topology.coordinate["tp"] == 0

    @torch.no_grad()
    def clip(self, loss: StageLoss, tokens: int | Tensor) -> StepResult:
        """Sum losses, tokens and gradient norm over all ranks, and clip the gradients. Collective over all ranks.

        Gradients are divided by ``max(1, (norm + 1e-6) / max_norm)``. If replicas take their own steps, the result has
        the mean of the replicas' norms, and is finite if all replicas' losses and norms are.

        Args:
            loss: this rank's share of the mean of each loss term.
            tokens: number of tokens on this rank.
        """
        device = self._topology.device
        share = 1.0 if self._shares_loss else 0.0
        counted = share if self._topology.coordinate["pp"] == 0 else 0.0  # every stage sees the same tokens
        none = torch.zeros((), device=device)  # a stage without the head has no loss
        terms = torch.stack([loss.terms.get(t, none) for t in self._coefficients]).to(wide_dtype(device)) * share
        flags = [on_device(flag, terms) for flag in (tokens * counted, float(self.stop()))]
        power = self._power(device)
        maximum = math.isinf(self._norm.p)
        # A maximum reduction may lose a NaN, so NaNs are counted in the sum.
        index, count = self._place
        powers = power.reshape(1)
        if count > 1:  # reduce the sums of all replicas in one message; each replica has its own element
            powers = power.new_zeros(count)
            powers[index] = power
        last = torch.isnan(powers).to(powers.dtype) if maximum else powers
        scalars = torch.cat([terms, *flags, last])
        if self._topology.world_size > 1:
            dist.all_reduce(scalars, group=self._topology.world)
            if maximum:
                dist.all_reduce(powers, dist.ReduceOp.MAX, group=self._topology.world)
        sums = scalars[-count:]
        norms = (torch.where(sums > 0, torch.nan, powers) if maximum else sums ** (1 / self._norm.p)).float()
        own, norm = (norms[index], norms.mean()) if count > 1 else (norms[0], norms[0])
        means = dict(zip(self._coefficients, scalars.float(), strict=False))
        total = torch.stack([c * means[term] for term, c in self._coefficients.items()]).sum()
        if self._max_norm is not None:
            self._divide(((own + 1e-6) / self._max_norm).clamp(min=1.0))
        tokens_at = len(means)
        return StepResult(
            loss=total,
            terms=means,
            grad_norm=norm,
            finite=torch.isfinite(norm) & torch.isfinite(total),
            tokens=scalars[tokens_at],
            stop=scalars[tokens_at + 1] > 0,
        )

    def _power(self, device: torch.device) -> Tensor:
        gradients = [local(p.grad) for p in self._counted.values() if p.grad is not None and local(p.grad).numel()]
        return self._norm(gradients, device)

    def _divide_here(self, divisor: Tensor) -> None:
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                by_device.setdefault(gradient.device, []).append(gradient)
        for device, gradients in by_device.items():
            torch._foreach_div_(gradients, divisor.to(device))


class GradientNorm:
    """Norm of this rank's gradients, before it is reduced over ranks.

    Args:
        p: order of the norm.
    """

    def __init__(self, p: float) -> None:
        self.p = p
        self._power = OpSlot("gradient_power", partial(gradient_power, p=p), p=p)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slot ``gradient_power``, which computes the sum of powers."""
        return {"gradient_power": self._power}

    def __call__(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """This rank's share of ``norm ** p``; for the maximum norm, of the norm itself.

        Args:
            gradients: non-empty tensors on any devices.
            device: device of the result.

        Returns:
            0-d tensor, float64 if the device supports it.
        """
        if not gradients:
            return torch.zeros((), dtype=wide_dtype(device), device=device)
        power: Tensor = self._power(gradients, device)
        return power


def gradient_power(gradients: Sequence[Tensor], device: torch.device, *, p: float) -> Tensor:
    """Reference implementation of the op ``gradient_power``: norms in float32, the sum of powers in a wider dtype.

    Args:
        gradients: one or more tensors, on any devices.
        device: device of the result.
        p: order of the norm; infinity returns the largest magnitude instead of a sum.

    Returns:
        0-d tensor.
    """
    # torch's get_total_norm would round each norm to the gradients' dtype. A test detects changes of this private op.
    norms = torch._foreach_norm(list(gradients), p, dtype=torch.float32)  # noqa: SLF001
    each = torch.stack([norm.to(device, non_blocking=True) for norm in norms]).to(wide_dtype(device))
    return each.max() if math.isinf(p) else (each**p).sum()


def division_of(optimizer: Optimizer, events: Events) -> Callable[[Tensor], None] | None:
    """Optimizer's method that divides gradients; ``None`` without one, or if a subscriber may read gradients."""
    read = events.heard(ev.OptimizerStepStarts, ev.OptimizerStepEnds)
    return optimizer.divide_gradients if isinstance(optimizer, DividesGradients) and not read else None


def counts(parameter: Tensor, topology: Topology, view: str | None = None, apart: Sequence[str] = ()) -> bool:
    """Whether this rank is the first with its shard of a parameter, and so counts the shard in the norm.

    Ranks have different shards along mesh dimensions that shard the parameter. Along all other dimensions, and along
    axes that the parameter's mesh does not span, the first rank counts. Each pipeline rank counts its own parameters,
    and each rank along the axes ``apart`` counts its own replica.
    """
    if topology.world_size == 1:
        return True
    grid = Grid({axis: topology.sizes[axis] for axis in AXES}) if view is None else topology.grid(view)
    own = grid.coordinate(topology.rank)
    spanned = {"pp", *apart}
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        if any(placement.is_replicate() and at for placement, at in zip(parameter.placements, coordinate, strict=True)):
            return False
        others = [grid.coordinate(rank) for rank in mesh.mesh.flatten().tolist()]
        spanned |= {axis for axis in own if any(other[axis] != own[axis] for other in others)}
    return all(at == 0 for axis, at in own.items() if axis not in spanned)
