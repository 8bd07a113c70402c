"""Base of routers: auxiliary losses, tallies (counts of a microbatch) and the selection bias, as traits of d9d-core.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from d9d_core.errors import BuildError
from d9d_core.model import ContextShare
from d9d_core.strategy import ContextCall, StepShape
from d9d_core.traits import LossTerm
from d9d_nn.auxiliary_loss import add_auxiliary_loss
from torch import Tensor, nn

from d9d_moe.balancing.base import Balancer, BalancingLoss, BiasUpdate, Choice
from d9d_moe.router.routing import count_rows


class BalancedRouter(nn.Module):
    """Balanced router: base of routers that count their choices and have balancers (losses or bias updates).

    Implements the traits ``AddsLosses``, ``HasTallies``, ``Adapts`` and ``LayoutDependent``. All buffers except the
    bias hold values of one forward or step and are not saved; they are overwritten on the device.

    Tallies of a microbatch: ``expert_tokens`` int64 [E], rows for which each expert was chosen, dropped rows included;
    ``tokens`` int64, number of positions; ``entropy`` float32, entropy of the normalised scores in nats, summed over
    positions; ``dropped`` int64, rows dropped because their expert was full, if there is a capacity. Padding is not
    counted.

    Loss terms are scaled by factors that the training loop sets; without a training loop, the factors are zero.

    Args:
        experts: E.
        balancing: balancers of the router.
        selection_bias: whether to keep a buffer ``selection_bias``, float32 [E], even if no balancer updates it.
        drops: whether rows may be dropped because their expert is full.

    Raises:
        BuildError: two balancers add the same term or update the bias, or a balancer is neither loss nor bias update.
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
            dtype = torch.float32 if name == "entropy" else torch.int64  # float32 cannot count beyond 2 ** 24
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
                raise BuildError("router: two balancers update the selection bias; keep one of them")
            self._update = balancer
        else:
            raise BuildError(
                f"router: the balancer {balancer!r} is neither a BalancingLoss nor a BiasUpdate; derive it from one"
            )

    def layout_dependence(self) -> Sequence[str]:
        """Describe the balancers whose result depends on the division of a batch into microbatches and over ranks."""
        kinds = [type(balancer).__name__ for balancer in self.balancing if not balancer.layout_invariant]
        return [f"{kind} balances the experts of each microbatch on each rank separately" for kind in kinds]

    def reset_buffers(self) -> None:
        """Fill all buffers with zeros."""
        for buffer in self.buffers(recurse=False):
            nn.init.zeros_(buffer)

    def loss_terms(self) -> Mapping[str, LossTerm]:
        return {term: loss.loss_term() for term, loss in self._losses.items()}

    def loss_factors(self) -> Mapping[str, Tensor]:
        """Buffers with the factors of the loss terms, by the names of the terms."""
        return {term: self.get_buffer(f"{term}_factor") for term in self._losses}

    def loss_sums(self) -> Mapping[str, Tensor]:
        """Buffers with the sums of the loss terms over a microbatch, by the names of the terms."""
        return {term: self.get_buffer(f"{term}_sum") for term in self._losses}

    def tallies(self) -> Mapping[str, Tensor]:
        """Buffers of the tallies (counts of a microbatch), by name."""
        return {name: self.get_buffer(f"tally_{name}") for name in self._tallies}

    def adapts_to(self) -> Sequence[str]:
        """Names of the tallies that :meth:`adapt` needs: the rows of each expert, if a balancer updates the bias."""
        return ("expert_tokens",) if self._update is not None else ()

    @torch.no_grad()
    def adapt(self, tallies: Mapping[str, Tensor], finite: Tensor) -> None:
        """Update the selection bias from the rows that each expert got in the step, if a balancer has a rule for it."""
        if self._update is not None:
            bias = self.get_buffer("selection_bias")
            bias.copy_(torch.where(finite, self._update.moved(bias, tallies["expert_tokens"]), bias))

    def everywhere(self, choice: Choice, context: ContextShare | None, scores: Callable[[Tensor], Tensor]) -> Choice:
        """Gather the router's choice over the ranks of ``cp``, so that the losses see all positions of each sample.

        Returns the choice unchanged if there are no losses or no ``cp``. Otherwise collective over ``cp``, also in the
        backward.
        """
        if context is None or not self.loss_terms():
            return choice

        def whole(tensor: Tensor) -> Tensor:
            return context.gather(tensor.view(choice.samples, -1, *tensor.shape[1:])).flatten(0, 1)

        padding = None if choice.padding is None else whole(choice.padding.byte()).bool()
        logits = whole(choice.logits)  # recomputing scores costs less than gathering them
        return Choice(logits, scores(logits), whole(choice.indices), choice.samples, padding)

    def collectives_everywhere(
        self, step: StepShape, context: ContextShare | None, chosen: int
    ) -> Sequence[ContextCall]:
        """Collectives of :meth:`everywhere`, for ``chosen`` experts per token; none without losses or ``cp``."""
        if context is None or not self.loss_terms():
            return ()
        ranks = context.ranks
        logits = step.bytes_of(ranks * self.experts, max(step.itemsize, 4))
        return (
            ContextCall("all_gather", logits, "logits"),
            ContextCall("all_gather", step.bytes_of(ranks * chosen, 8), "chosen experts"),
            ContextCall("all_gather", step.bytes_of(ranks, 1), "padding, if there is any", at_most=True),
            ContextCall("reduce_scatter", logits, "gradients of logits", backward=True),
        )

    def add_auxiliary_losses(self, weights: Tensor, choice: Choice) -> Tensor:
        """Return the weights [T, k] with the loss terms attached: their backward also starts the terms' backward."""
        for term, loss in self._losses.items():
            total = loss.total(choice)
            with torch.no_grad():
                self.get_buffer(f"{term}_sum").copy_(total)
            weights = add_auxiliary_loss(weights, total, self.get_buffer(f"{term}_factor"))
        return weights

    @torch.no_grad()
    def tally(self, choice: Choice, counts: Tensor) -> None:
        """Record the tallies of a choice; ``counts`` int64 [E] are the rows that each expert accepted."""
        found = {"expert_tokens": counts, "entropy": torch.special.entr(choice.shares().detach()).sum()}
        if "dropped" in self._tallies:
            # Count the choices before dropping, because full experts all accept the same number of rows.
            found["expert_tokens"] = count_rows(choice.indices, self.experts)
            found["dropped"] = found["expert_tokens"].sum() - counts.sum()
        for name, value in found.items():
            self.get_buffer(f"tally_{name}").copy_(value)
        positions, tokens = choice.positions(), self.get_buffer("tally_tokens")
        tokens.copy_(positions) if isinstance(positions, Tensor) else tokens.fill_(positions)
