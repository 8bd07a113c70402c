"""Selective checkpointing by operator: outputs that a checkpointed block keeps."""

from __future__ import annotations

import difflib
import fnmatch
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from d9d_core.extend import BuildError
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

#: Makes the contexts in which a block's forward and its repetition run.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class KeepOutputs:
    """Policy of torch's selective checkpointing: keep the outputs of some operators.

    Args:
        patterns: over their names.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(patterns)
        self._operators: frozenset[OpOverload] | None = None

    def __call__(
        self, _context: SelectiveCheckpointContext, operator: object, *_args: object, **_kwargs: object
    ) -> CheckpointPolicy:
        """Decide about the outputs of one call.

        Raises:
            BuildError: a pattern matches no operator.
        """
        if self._operators is None:
            self._operators = frozenset(found for pattern in self._patterns for found in find_operators(pattern))
        return CheckpointPolicy.MUST_SAVE if operator in self._operators else CheckpointPolicy.PREFER_RECOMPUTE


#: Contexts of blocks that keep nothing.
KEEPING_NOTHING: Contexts = partial(create_selective_checkpoint_contexts, KeepOutputs(()))


def keeping(patterns: Sequence[str]) -> Contexts | None:
    """Contexts of blocks that keep the outputs of matching operators; ``None`` without patterns.

    Blocks should share the result: Dynamo compiles anew for another one.

    Args:
        patterns: over operator names, such as ``aten.mm``. Those of an installed package may be registered until the
            first block runs, as kernels of plugins are imported after strategies.

    Raises:
        BuildError: a pattern matches no operator.
    """
    for pattern in patterns:
        if not _may_come(pattern):
            find_operators(pattern)
    # Dynamo takes a function or a partial, and looks at neither's inside.
    return partial(create_selective_checkpoint_contexts, KeepOutputs(patterns)) if patterns else None


def _may_come(pattern: str) -> bool:
    """Whether a package may register operators of this name when it is imported."""
    package, dot, _ = pattern.partition(".")
    return bool(dot) and package.isidentifier() and (package in sys.modules or find_spec(package) is not None)


def find_operators(pattern: str) -> list[OpOverload]:
    """Overloads of all registered operators whose ``namespace.name`` matches.

    Raises:
        BuildError: there is none.
    """
    # torch.ops lists only what was used before, so this asks the dispatcher; private, so a test pins it.
    registered = {name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}  # noqa: SLF001
    matched = [name.partition(".") for name in sorted(fnmatch.filter(registered, pattern))]
    # A library may register kernels of operators that it does not define, as torchao does without its extension.
    found = (getattr(getattr(torch.ops, space), name, None) for space, _, name in matched)
    packets = [packet for packet in found if packet is not None]
    if not packets:
        near = difflib.get_close_matches(pattern, sorted(registered), n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "names look like 'aten.mm'"
        raise BuildError(
            f"strategy 'activation_checkpointing': the pattern {pattern!r} in 'save' matches no operator; {hint}"
        )
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
