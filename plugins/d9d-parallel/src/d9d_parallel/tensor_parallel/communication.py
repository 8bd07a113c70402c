"""Collectives of tensor parallelism in a step, for each split module, in forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from d9d_core.model import MultipliesRows
from d9d_core.strategy import Collective, CommunicatesAlone, Kind, StepShape
from d9d_core.traits import modules_with
from torch import nn

Exchange = Literal["all_gather", "reduce_scatter"]
Way = Literal["forward", "backward"]


@dataclass(frozen=True)
class Site:
    """Module whose forward all-gathers or reduce-scatters the positions of hidden states.

    Attributes:
        module: qualified name.
        forward: collective of the forward.
        backward: collective of the gradient, if there is one.
        features: number of features of the hidden states; ``None`` if the module does not declare it.
        in_turns: whether each collective is done as one all-to-all per other rank, overlapped with matrix products.
        fused: passes of a site with ``in_turns`` whose exchange and products are one call of symmetric memory, without
            all-to-alls.
    """

    module: str
    forward: Exchange
    backward: Exchange | None
    features: int | None
    in_turns: bool = False
    fused: tuple[Way, ...] = ()


@dataclass
class TensorCommunication:
    """Communication (:class:`d9d_core.strategy.Communication`) of tensor parallelism: a stage is split over ``tp``.

    Attributes:
        stage: stage with the sites.
        ranks: ranks of ``tp``.
        sites: modules that exchange hidden states, in the order of registration.
        alone: modules that communicate by themselves (trait ``CommunicatesAlone``), by qualified name.
    """

    stage: nn.Module
    ranks: tuple[int, ...]
    sites: list[Site] = field(default_factory=list)
    alone: dict[str, CommunicatesAlone] = field(default_factory=dict)

    def __call__(self, step: StepShape) -> Iterator[Collective]:
        """List the collectives of all sites; with frozen layers, some of the backward may be skipped."""
        known = [site.features for site in self.sites if site.features is not None]
        frozen = any(not parameter.requires_grad for parameter in self.stage.parameters())
        if len(self.ranks) == 1:
            return
        factors = {
            f"{owner}.{name}" if owner else name: factor
            for owner, module in modules_with(self.stage, MultipliesRows).items()
            for name, factor in module.row_factors().items()
        }

        def shape_at(module: str) -> StepShape:
            return replace(step, samples=factors.get(module, 1) * step.samples)

        for site in self.sites:
            features = site.features or (known[0] if known else None)
            size = None if features is None else shape_at(site.module).bytes_of(features)
            what = f"hidden states at {site.module or 'the model'}"
            ways: tuple[tuple[Way, Exchange | None], ...] = (("forward", site.forward), ("backward", site.backward))
            for way, exchange in ways:
                if exchange is None:
                    continue
                ahead, fused = way == "forward", way in site.fused
                in_turns = site.in_turns and not fused
                kind: Kind = "all_to_all" if in_turns else exchange
                parts, turns = (len(self.ranks), len(self.ranks) - 1) if in_turns else (1, 1)
                how = f"{exchange} in turns, " if in_turns else "through symmetric memory, " if fused else ""
                yield Collective(
                    kind,
                    "tp",
                    self.ranks,
                    None if size is None else size // parts,
                    turns * (step.forwards if ahead else step.backwards),
                    f"{what}, {how}{way}",
                    site.module if ahead else None,
                    step.approximate,
                    at_most=frozen and not ahead,
                )
        for name, module in self.alone.items():
            for kind, size in module.forward_collectives(shape_at(name)):
                yield Collective(
                    kind, "tp", self.ranks, size, step.forwards, f"inside {name}, forward", name, step.approximate
                )
