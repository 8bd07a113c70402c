"""Base of routers: auxiliary losses, tallies and the selection bias, as the loop of d9d-core asks for them.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from d9d_core.errors import BuildError
from d9d_core.traits import LossTerm
from d9d_nn.auxiliary_loss import add_auxiliary_loss
from torch import Tensor, nn

from d9d_moe.balancing.base import Balancer, BalancingLoss, BiasUpdate, Choice
from d9d_moe.router.routing import count_rows


class BalancedRouter(nn.Module):
    """Balanced router: base of routers that count what they choose, and that balancers act on.

    Implements the traits ``AddsLosses``, ``HasTallies``, ``Adapts`` and ``LayoutDependent``. All buffers but the bias
    belong to one forward or step and are not saved; they are overwritten on the device.

    Tallies of a microbatch: ``expert_tokens`` int64 [E], rows for which each expert was chosen, whether or not it took
    them; ``tokens`` int64, positions; ``entropy`` float32, of the normalised scores in nats, summed over positions;
    ``dropped`` int64, rows that found their expert full, if there is a capacity. Padding counts in none of them.

    Loss terms act with the factors that the loop fills in; in a router alone they are zero.

    Args:
        experts: E.
        balancing: balancers of the router.
        selection_bias: keep a buffer of this name, float32 [E], even if no balancer moves it.
        drops: whether rows may be dropped.

    Raises:
        BuildError: two balancers share a term or move the bias, or one is neither a loss nor a bias update.
    """

    def __init__(self, experts: int, balancing: Sequence[Balancer], *, selection_bias: bool, drops: bool) -> None:
        super().__init__()
        self.experts = experts
        self.balancing = tuple(balancing)
        self._losses: dict[str, BalancingLoss] = {}
        self._update: BiasUpdate | None = None
        for balancer in self.balancing:
            self._admit(balancer)
        for term in self._losses:
            self.register_buffer(f"{term}_factor", torch.empty((), dtype=torch.float32), persistent=False)
            self.register_buffer(f"{term}_sum", torch.empty((), dtype=torch.float32), persistent=False)
        self._tallies = ("expert_tokens", "tokens", "entropy", *(("dropped",) if drops else ()))
        for name in self._tallies:
            dtype = torch.float32 if name == "entropy" else torch.int64  # beyond 2 ** 24 float32 cannot count
            empty = torch.empty(experts if name == "expert_tokens" else (), dtype=dtype)
            self.register_buffer(f"tally_{name}", empty, persistent=False)
        biased = selection_bias or self._update is not None
        self.register_buffer("selection_bias", torch.empty(experts, dtype=torch.float32) if biased else None)

    def _admit(self, balancer: Balancer) -> None:
        if isinstance(balancer, BalancingLoss):
            if balancer.term in self._losses:
                raise BuildError(f"router: two balancers add the loss term '{balancer.term}'; keep one of them")
            self._losses[balancer.term] = balancer
        elif isinstance(balancer, BiasUpdate):
            if self._update is not None:
                raise BuildError("router: two balancers move the bias of the selection; keep one of them")
            self._update = balancer
        else:
            raise BuildError(f"router: {balancer!r} is neither a BalancingLoss nor a BiasUpdate")

    def layout_dependence(self) -> Sequence[str]:
        """Balancers that depend on how a batch is cut into microbatches and spread over ranks."""
        kinds = [type(balancer).__name__ for balancer in self.balancing if not balancer.layout_invariant]
        return [f"{kind} balances the experts of each microbatch on each rank by itself" for kind in kinds]

    def reset_buffers(self) -> None:
        """Fill all buffers with zeros."""
        for buffer in self.buffers(recurse=False):
            nn.init.zeros_(buffer)

    def loss_terms(self) -> Mapping[str, LossTerm]:
        """Loss terms of the balancers."""
        return {term: loss.loss_term() for term, loss in self._losses.items()}

    def loss_factors(self) -> Mapping[str, Tensor]:
        """Buffer of each term's factor."""
        return {term: self.get_buffer(f"{term}_factor") for term in self._losses}

    def loss_sums(self) -> Mapping[str, Tensor]:
        """Buffer of each term's sum."""
        return {term: self.get_buffer(f"{term}_sum") for term in self._losses}

    def tallies(self) -> Mapping[str, Tensor]:
        """Buffer of each tally."""
        return {name: self.get_buffer(f"tally_{name}") for name in self._tallies}

    def adapts_to(self) -> Sequence[str]:
        """Tally of the rows of each expert, if a balancer moves the bias."""
        return ("expert_tokens",) if self._update is not None else ()

    @torch.no_grad()
    def adapt(self, tallies: Mapping[str, Tensor], finite: Tensor) -> None:
        """Move the bias by the rows of the whole step, if a balancer does that; nothing waits for the device."""
        if self._update is not None:
            bias = self.get_buffer("selection_bias")
            bias.copy_(torch.where(finite, self._update.moved(bias, tallies["expert_tokens"]), bias))

    def add_auxiliary_losses(self, weights: Tensor, choice: Choice) -> Tensor:
        """Attach the loss terms to the weights [T, k]: gradients of the terms begin where theirs arrive."""
        for term, loss in self._losses.items():
            total = loss.total(choice)
            with torch.no_grad():
                self.get_buffer(f"{term}_sum").copy_(total)
            weights = add_auxiliary_loss(weights, total, self.get_buffer(f"{term}_factor"))
        return weights

    @torch.no_grad()
    def tally(self, choice: Choice, counts: Tensor) -> None:
        """Count what was chosen, and the rows int64 [E] that each expert took of it."""
        found = {"expert_tokens": counts, "entropy": torch.special.entr(choice.shares().detach()).sum()}
        if "dropped" in self._tallies:
            # Balance is about what was asked for: what full experts took looks even however uneven that is.
            found["expert_tokens"] = count_rows(choice.indices, self.experts)
            found["dropped"] = found["expert_tokens"].sum() - counts.sum()
        for name, value in found.items():
            self.get_buffer(f"tally_{name}").copy_(value)
        positions, tokens = choice.positions(), self.get_buffer("tally_tokens")
        tokens.copy_(positions) if isinstance(positions, Tensor) else tokens.fill_(positions)
