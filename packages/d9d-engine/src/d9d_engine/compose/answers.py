"""Answers of kernel backends to a signature, and the choice among them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.components.contract import type_of
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.kernel import Decision, OpSignature
from d9d_core.plugin import KernelSpec
from d9d_core.registry.entries import Entry


def asked(spec: KernelSpec, signature: OpSignature) -> Decision:
    """Answer of a backend to a signature; a refusal if the plugin fails or returns no decision."""
    supports = spec.supports
    try:
        decision: object = supports.load()(signature)
    except FOREIGN_FAILURES as error:
        return Decision(False, f"{supports} failed: {error!r}")
    if not isinstance(decision, Decision):
        return Decision(False, f"{supports} returned {type_of(decision)}, not a Decision")
    return decision


def best(answers: Mapping[Entry, Decision]) -> Entry | None:
    """Accepting backend with the highest priority above 0; ties are resolved by distribution and name."""
    accepted = [entry for entry, decision in answers.items() if decision.accept and decision.priority > 0]
    return min(
        accepted, key=lambda e: (-answers[e].priority, e.origin.distribution, e.spec.key, e.origin.module), default=None
    )
