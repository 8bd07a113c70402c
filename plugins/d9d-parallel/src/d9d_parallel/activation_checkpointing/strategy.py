"""Strategy ``activation_checkpointing`` (Chen et al., Training Deep Nets with Sublinear Memory Cost)."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from d9d_core.errors import BuildError
from d9d_core.strategy import Applied, no_collectives
from d9d_core.topology import Topology
from d9d_core.traits import HasOps, modules_with
from torch import nn

from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.activation_checkpointing.operators import KeepOutputs, WarnOfUnmet, contexts_of, unknown_operators
from d9d_parallel.activation_checkpointing.recompute import checkpoint_module, is_checkpointed
from d9d_parallel.blocks import find_blocks


class ActivationCheckpointing:
    """Strategy of activation checkpointing: stores only the inputs of chosen blocks and the outputs of chosen ops."""

    def __init__(self, config: ActivationCheckpointingConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:  # noqa: ARG002 - needs no mesh
        """Change the forward of the chosen blocks in place.

        Raises:
            BuildError: the stage has no blocks, a block is checkpointed already, or a name with a dot in ``save``
                matches no operator.
        """
        blocks = find_blocks(stage, self._config.name)
        chosen, unmatched = choose(list(blocks), self._config.match, self._config.every)
        for name in chosen:
            if is_checkpointed(blocks[name]):
                raise BuildError(
                    f"strategy '{self._config.name}' would checkpoint block '{name}' a second time; "
                    "let the 'match' patterns of its entries in 'parallel' name different blocks"
                )
        holders = [holder for name in chosen for holder in modules_with(blocks[name], HasOps).values()]
        slots = [slot for holder in holders for slot in holder.op_slots().values()]
        ops = {slot.op for slot in slots}
        unknown = unknown_operators(self._config.save, ops)
        save = [entry for entry in self._config.save if entry not in unknown]
        policy = KeepOutputs(save, slots)
        contexts = contexts_of(policy) if save else None
        for name in chosen:
            checkpoint_module(blocks[name], preserve_rng_state=self._config.preserve_rng_state, contexts=contexts)
        if save:
            stage.register_forward_pre_hook(WarnOfUnmet(policy))
        return Applied(
            modules=tuple(chosen),
            unmatched={**unmatched, **unknown},
            collectives=no_collectives,
            check_kernels=policy.check,
            storing=() if ops.issuperset(save) else tuple(chosen),
        )


def choose(names: Sequence[str], patterns: Sequence[str], every: int) -> tuple[list[str], dict[str, str]]:
    """Choose every ``every``-th of the names that match a pattern, in order, from the first on.

    Also returns the patterns that match no name, each with the error message for the case that no stage matches it.
    """
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    unmatched = {
        pattern: f"strategy 'activation_checkpointing': the pattern {pattern!r} in 'match' matches no block; "
        f"blocks: {shown}"
        for pattern in patterns
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names)
    }
    matched = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    return matched[::every], unmatched
