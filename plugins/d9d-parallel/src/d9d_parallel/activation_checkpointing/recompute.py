"""Forward of a checkpointed block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_engine.compat import recomputes_inside_functions
from torch import nn
from torch.utils.checkpoint import checkpoint

from d9d_parallel.activation_checkpointing.operators import KEEPING_NOTHING, Contexts


class Recomputed:
    """Recomputed forward of a module: activations are not stored but recomputed in the backward.

    Replaces ``module.forward``, so neither the module tree nor any parameter name changes. It is a class with a Python
    ``__call__``, not a ``functools.partial``: Dynamo looks for a Python frame to compile, and would skip a partial and
    with it the whole block. It is not a closure, because deep copies of the module must call their own forward.

    Args:
        forward: original forward of the module.
        preserve_rng_state: whether the recomputation must draw the same random numbers.
        contexts: contexts of selective checkpointing from
            :func:`d9d_parallel.activation_checkpointing.operators.contexts_of`; ``None`` stores no operator's output.
    """

    def __init__(
        self, forward: Callable[..., Any], *, preserve_rng_state: bool, contexts: Contexts | None = None
    ) -> None:
        self.forward = forward
        self.preserve_rng_state = preserve_rng_state
        self.contexts = contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward without storing its activations; the backward runs it again."""
        contexts = self.contexts
        if contexts is None and torch.compiler.is_compiling() and not recomputes_inside_functions():
            contexts = KEEPING_NOTHING
        # Dynamo refuses torch's default for `context_fn`, so it is passed only if given.
        if contexts is not None:
            kwargs["context_fn"] = contexts
        return checkpoint(
            self.forward, *args, use_reentrant=False, preserve_rng_state=self.preserve_rng_state, **kwargs
        )


def checkpoint_module(module: nn.Module, *, preserve_rng_state: bool = True, contexts: Contexts | None = None) -> None:
    """Make one module recompute its forward in the backward, in place.

    Args:
        module: module with the forward.
        preserve_rng_state: whether the recomputation must draw the same random numbers.
        contexts: contexts of selective checkpointing from
            :func:`d9d_parallel.activation_checkpointing.operators.contexts_of`; ``None`` stores no operator's output.
    """
    module.forward = Recomputed(module.forward, preserve_rng_state=preserve_rng_state, contexts=contexts)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether :func:`checkpoint_module` was applied."""
    return isinstance(module.forward, Recomputed)
