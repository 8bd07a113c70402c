"""Balance of experts in transformers' models: loss terms, tallies and updates of selection biases by d9d-moe.

Shapes: B samples, T tokens, E experts, k experts of a token, H features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.model import ContextShare, SequenceShare
from d9d_core.strategy import ContextCall, Kind, StepShape
from d9d_moe.balancing.balanced_router import BalancedRouter
from d9d_moe.balancing.base import Balancer, BalancingLoss, BiasUpdate, Choice
from d9d_moe.router.routing import count_rows
from torch import Tensor, nn
from torch.nn import functional

from d9d_transformers.routers import RouterFacts, scores_of


class Balance(BalancedRouter):
    """Balance of the experts of one layer, whose router is the router of transformers.

    The scores of all experts are computed again from the hidden states and the router's matrix, with gradients to both.
    The selection bias is transformers' own buffer, converted to float32.

    Args:
        experts: E.
        chosen: k.
        balancing: balancers of the router.
        parent: module with the router and the experts.
        facts: facts about the router.

    Attributes:
        samples: B of the microbatch; set by the model before its layers run, like ``padding``.
        padding: bool [T], padded positions of all ranks of ``tp``, which are not counted; ``None`` without padding.

    Raises:
        BuildError: two balancers add the same term or update the bias, or the router has no selection bias to update.
    """

    def __init__(
        self, experts: int, chosen: int, balancing: Sequence[Balancer], parent: nn.Module, facts: RouterFacts
    ) -> None:
        super().__init__(
            experts, [one for one in balancing if isinstance(one, BalancingLoss)], selection_bias=False, drops=False
        )
        self.balancing, self.chosen = tuple(balancing), chosen
        updates = [one for one in balancing if isinstance(one, BiasUpdate)]
        if len(updates) > 1:
            raise BuildError("model.balancing: two balancers update the selection bias; keep one of them")
        self._moves = updates[0] if updates else None
        # In a tuple, so that the router's parameters do not become this module's.
        self._router = (parent.get_submodule(facts.module),)
        self._facts, self._owner, self._bias = facts, (parent,), ""
        if self._moves is not None:
            self._keep_bias(parent, facts)
        self.samples = 1
        self.padding: Tensor | None = None
        self._share: SequenceShare | None = None
        self._context: ContextShare | None = None

    def _keep_bias(self, parent: nn.Module, facts: RouterFacts) -> None:
        """Keep the selection bias in float32, because bfloat16 would round small updates away."""
        path, _, name = (facts.bias or "").rpartition(".")
        owner = parent.get_submodule(path)
        if facts.bias is None or name not in dict(owner.named_buffers(recurse=False)):
            raise BuildError(
                f"model.balancing: the router of {type(parent).__name__} has no buffer that biases the selection, so "
                "bias_update has nothing to update; use auxiliary_loss"
            )
        owner.register_buffer(name, owner.get_buffer(name).float())
        self._owner, self._bias = (owner,), name

    def reset_parameters(self) -> None:
        """Set the buffers of losses and tallies to zero."""
        self.reset_buffers()

    def see_sequence(self, share: SequenceShare) -> None:
        """Prepare for inputs that hold only this rank's share of the positions under ``tp``.

        :meth:`forward` then all-gathers the logits and the chosen experts, so that each rank computes the losses and
        the tallies of all positions.
        """
        self._share = share

    def see_context(self, share: ContextShare) -> None:
        """Prepare for inputs that hold only this rank's share of the positions under ``cp``.

        Losses then cover the positions of all ranks, but tallies only the positions of this rank.
        """
        self._context = share

    def forward_collectives(self, step: StepShape) -> Sequence[tuple[Kind, int | None]]:
        """Collectives over ``tp``: the all-gathers of logits [B, S, E] and of the chosen experts [B, S, k]."""
        return [
            ("all_gather", step.bytes_of(self.experts, max(step.itemsize, 4))),
            ("all_gather", step.bytes_of(self.chosen, 8)),
        ]

    def context_collectives(self, step: StepShape) -> Sequence[ContextCall]:
        """Collectives of losses over samples whose positions are split over ``cp``; no collectives without losses."""
        return self.collectives_everywhere(step, self._context, self.chosen)

    def adapts_to(self) -> Sequence[str]:
        """Names of the tallies that :meth:`adapt` needs: the rows of each expert, if a balancer updates the bias."""
        return ("expert_tokens",) if self._moves is not None else ()

    @torch.no_grad()
    def adapt(self, tallies: Mapping[str, Tensor], finite: Tensor) -> None:
        """Update the selection bias from the rows of the whole step, if a balancer does; the host does not wait."""
        if self._moves is not None:
            bias = self._owner[0].get_buffer(self._bias)
            moved = self._moves.moved(bias.flatten(), tallies["expert_tokens"]).view_as(bias)
            bias.copy_(torch.where(finite, moved, bias))

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Attach loss terms to the weights, and count the choices.

        Collective over ``tp`` and, with losses, over ``cp``, if ranks share the positions.

        Args:
            hidden: [T, H], input of the router.
            indices: int64 [T, k], experts of each token.
            weights: [T, k], factors of the experts' outputs.

        Returns:
            The weights [T, k].
        """
        logits = self._logits(hidden)
        if self._share is not None:
            logits = self._share.gather(logits.view(self.samples, -1, self.experts)).flatten(0, 1)
            indices = self._share.gather(indices.view(self.samples, -1, indices.shape[1])).flatten(0, 1)
        if self.padding is not None:
            indices = indices.masked_fill(self.padding.unsqueeze(1), self.experts)
        choice = Choice(logits, self._scores(logits), indices, self.samples, self.padding)
        weights = self.add_auxiliary_losses(weights, self.everywhere(choice, self._context, self._scores))
        self.tally(choice, count_rows(indices, self.experts))
        return weights

    def _scores(self, logits: Tensor) -> Tensor:
        return scores_of(logits, self._facts.scoring)

    def _logits(self, hidden: Tensor) -> Tensor:
        router: Any = self._router[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        bias = getattr(router, "bias", None)
        # The meta device has no autocast to switch off.
        with nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.to(wide), router.weight.to(wide), None if bias is None else bias.to(wide))
