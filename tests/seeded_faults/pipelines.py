"""Faults in pipelines, and in parameters that stages share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from d9d_engine.compose import weights as build
from d9d_engine.job import Job
from d9d_engine.step.tied import Ties
from d9d_pipeline.runtime.handlers import SplitBackwardHandlers
from d9d_pipeline.runtime.transfers import Transfers

from seeded_faults.seeding import Patch


def swapped_microbatches(_job: Job, patch: Patch) -> None:
    """The first two microbatches are swapped when they are sent to the next stage."""
    send = Transfers._send_activation

    def swapped(self: Transfers, action: Any, state: Any) -> None:
        if action.microbatch != 0:
            send(self, action, state)
        if action.microbatch == 1:
            send(self, replace(action, microbatch=0), state)

    patch.setattr(Transfers, "_send_activation", swapped)


def dropped_boundary_gradient(_job: Job, patch: Patch) -> None:
    """One microbatch sends zeros as gradients to the previous stage."""
    send = Transfers._send_gradient

    def dropped(self: Transfers, action: Any, state: Any) -> None:
        if action.microbatch == 1:
            for gradient in state.input_gradients[action.stage, action.microbatch].values():
                gradient.zero_()
        send(self, action, state)

    patch.setattr(Transfers, "_send_gradient", dropped)


def forgotten_weights(_job: Job, patch: Patch) -> None:
    """One microbatch never computes the gradients of its weights."""
    weights = SplitBackwardHandlers.weights

    def forgotten(self: SplitBackwardHandlers, action: Any, state: Any) -> None:
        if action.microbatch == 1:
            del state.weights[action.stage, action.microbatch]
        else:
            weights(self, action, state)

    patch.setattr(SplitBackwardHandlers, "weights", forgotten)


def forgotten_tie_across_ranks(_job: Job, patch: Patch) -> None:
    """Each rank updates its copy of the embedding with its own part of the gradient."""
    patch.setattr(Ties, "reduce", lambda _self: None)


def forgotten_tie_on_a_rank(_job: Job, patch: Patch) -> None:
    """The copy of the embedding on another stage of the same rank does not receive the summed gradient."""
    patch.setattr(Ties, "gather", lambda _self: None)


def stale_copy(_job: Job, patch: Patch) -> None:
    """The copy of the embedding on another stage of the same rank is never updated."""
    copy_values = Ties.copy_values
    spreads: list[Ties] = []

    def once(self: Ties) -> None:
        if not spreads:
            copy_values(self)
        spreads.append(self)

    patch.setattr(Ties, "copy_values", once)


def tie_counted_twice(_job: Job, patch: Patch) -> None:
    """The gradient norm counts the embedding once for each rank with a copy."""
    find = build.find_ties  # type: ignore[attr-defined]
    patch.setattr(build, "find_ties", lambda *given, **more: replace(find(*given, **more), elsewhere=frozenset()))
