"""Capabilities of every decoder, for declarations of models. Imports nothing."""

from __future__ import annotations

#: Capabilities for :attr:`d9d_core.plugin.ModelSpec.provides`.
CAPABILITIES = frozenset(
    {
        "model:blocks", "model:causal_lm", "model:context_parallel", "model:late_init", "model:ops", "model:divisible",
        "model:adjacent_weights", "model:pipeline", "model:split_backward", "model:tensor_parallel",
    }
)  # fmt: skip
