"""Selective checkpointing by operator: outputs that a checkpointed block keeps."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

_log = logging.getLogger("d9d.activation_checkpointing")

#: Makes the contexts in which a block's forward and its repetition run.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class KeepOutputs:
    """Policy of torch's selective activation checkpointing: keep the outputs of some operators.

    Operators are looked up in the first call: kernels are bound after strategies, and imported then.

    Args:
        save: ops of the slots by name, and patterns over names of operators.
        slots: those of the blocks.
    """

    def __init__(self, save: Iterable[str], slots: Sequence[OpSlot] = ()) -> None:
        self._save = tuple(save)
        self._slots = slots
        self._operators: Mapping[OpOverload, Collection[str]] | None = None
        self._met: set[str] = set()

    def __call__(
        self, _context: SelectiveCheckpointContext, operator: OpOverload, *_args: object, **_kwargs: object
    ) -> CheckpointPolicy:
        """Decide about the outputs of one call.

        Raises:
            BuildError: a pattern matches no operator.
        """
        if self._operators is None:
            self._operators = self._find()
        kept_for = self._operators.get(operator)
        if kept_for is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._met.update(kept_for)
        return CheckpointPolicy.MUST_SAVE

    def check(self) -> None:
        """Check the kernels of the ops that are to be kept, once they are bound.

        Raises:
            BuildError: one names no operators.
        """
        for slot in self._slots:
            if slot.op in self._save and not slot.operators:
                raise BuildError(
                    f"strategy 'activation_checkpointing': {slot.op!r} in 'save': its kernel '{slot.backend}' has no "
                    "operators whose outputs a block could keep; choose another with 'kernels', or leave it out"
                )

    def unmet(self) -> list[str]:
        """Entries for which no call of an operator was seen so far; none without any call of the policy.

        A compiler that finds a block in its cache does not ask.
        """
        return [] if self._operators is None else [entry for entry in self._save if entry not in self._met]

    def _find(self) -> dict[OpOverload, set[str]]:
        found: dict[OpOverload, set[str]] = {}
        for entry in self._save:
            of_slots = [pattern for slot in self._slots if slot.op == entry for pattern in slot.operators]
            for pattern in dict.fromkeys(of_slots or [entry]):
                for operator in find_operators(pattern):
                    found.setdefault(operator, set()).add(entry)
        return found


class WarnOfUnmet:
    """Hook before a stage's forward that warns, in the second one, of operators to keep that no block called.

    Args:
        policy: of the stage's blocks.
    """

    def __init__(self, policy: KeepOutputs) -> None:
        self._policy = policy
        self._forwards = 0

    def __call__(self, _stage: nn.Module, _args: object) -> None:
        """Count the forward."""
        self._forwards += 1
        if self._forwards == 2 and (unmet := self._policy.unmet()):
            _log.warning(
                "activation_checkpointing keeps nothing for %s in 'save': no checkpointed block here runs such an "
                "operator; 'd9d explain' lists the kernels that run",
                ", ".join(map(repr, unmet)),
            )


#: Contexts of blocks that keep nothing.
KEEPING_NOTHING: Contexts = partial(create_selective_checkpoint_contexts, KeepOutputs(()))


def contexts_of(policy: KeepOutputs) -> Contexts:
    """Contexts of blocks with this policy. They should share them: Dynamo compiles anew for others."""
    # Dynamo takes a function or a partial, and looks at neither's inside.
    return partial(create_selective_checkpoint_contexts, policy)


def unknown_operators(save: Sequence[str], ops: Collection[str]) -> dict[str, str]:
    """Unknown operators to keep: entries without a dot that match no op of these blocks and no operator, with reasons.

    Args:
        save: ops, or patterns over operator names, such as ``aten.mm``. Operators of an installed package may be
            registered until the first block runs.
        ops: those that the blocks call.

    Raises:
        BuildError: an entry with a dot matches no operator.
    """
    unknown = {}
    for entry in save:
        if entry in ops or _may_come(entry):
            continue
        try:
            find_operators(entry, ops)
        except BuildError as error:
            if "." in entry:
                raise
            unknown[entry] = str(error)  # the blocks of another stage may have such an op
    return unknown


def _may_come(pattern: str) -> bool:
    """Whether a package may register operators of this name when it is imported."""
    package, dot, _ = pattern.partition(".")
    return bool(dot) and package.isidentifier() and (package in sys.modules or find_spec(package) is not None)


def find_operators(pattern: str, ops: Collection[str] = ()) -> list[OpOverload]:
    """Find operators by name: overloads of all registered operators whose ``namespace.name`` matches.

    Args:
        pattern: over their names.
        ops: further names, for the message.

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
        near = difflib.get_close_matches(pattern, ops) or difflib.get_close_matches(pattern, sorted(registered))
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "names look like 'attention' or 'aten.mm'"
        here = f" (ops of its blocks: {', '.join(sorted(ops))})" if ops and "." not in pattern else ""
        raise BuildError(
            f"strategy 'activation_checkpointing': {pattern!r} in 'save' matches no operator; {hint}{here}"
        )
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
