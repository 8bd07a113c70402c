"""Selective activation checkpointing: a checkpointed block stores the outputs of chosen operators."""

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

#: Function that makes the contexts for a block's forward and for its recomputation.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class KeepOutputs:
    """Policy for torch's selective activation checkpointing: store the outputs of some operators.

    Operators are looked up in the first call, because kernels are bound and imported after the strategies.

    Args:
        save: names of ops, and patterns of names of torch operators, whose outputs are stored.
        slots: op slots of the blocks, by which the operators of an op's bound kernel are found.
    """

    def __init__(self, save: Iterable[str], slots: Sequence[OpSlot] = ()) -> None:
        self._save = tuple(save)
        self._slots = slots
        self._operators: Mapping[OpOverload, Collection[str]] | None = None
        self._met: set[str] = set()

    def __call__(
        self, _context: SelectiveCheckpointContext, operator: OpOverload, *_args: object, **_kwargs: object
    ) -> CheckpointPolicy:
        """Return the policy for one operator call: store its outputs, or recompute them.

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
        """Check the bound kernels of the ops in ``save``.

        Raises:
            BuildError: the kernel of an op declares no operators.
        """
        for slot in self._slots:
            if slot.op in self._save and not slot.operators:
                raise BuildError(
                    f"strategy 'activation_checkpointing': {slot.op!r} in 'save': its kernel '{slot.backend}' has no "
                    "operators whose outputs could be stored; choose another with 'kernels', or remove the op"
                )

    def unmet(self) -> list[str]:
        """Entries of ``save`` for which no operator has been called so far; empty before the first call of the policy.

        The policy is not called for a block that the compiler finds in its cache.
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
    """Forward pre-hook of a stage; in the second forward, warns of entries of ``save`` whose operators no block called.

    Args:
        policy: policy of the stage's blocks.
    """

    def __init__(self, policy: KeepOutputs) -> None:
        self._policy = policy
        self._forwards = 0

    def __call__(self, _stage: nn.Module, _args: object) -> None:
        """Count forwards of the stage; in the second, warn of entries of ``save`` whose operators no block called."""
        self._forwards += 1
        if self._forwards == 2 and (unmet := self._policy.unmet()):
            _log.warning(
                "activation_checkpointing stores nothing for %s in 'save': no checkpointed block here calls such an "
                "operator; 'd9d explain' lists the kernels in use",
                ", ".join(map(repr, unmet)),
            )


#: Contexts of blocks that store no operator's output.
KEEPING_NOTHING: Contexts = partial(create_selective_checkpoint_contexts, KeepOutputs(()))


def contexts_of(policy: KeepOutputs) -> Contexts:
    """Contexts of selective checkpointing with a policy; blocks should share them, or Dynamo recompiles each block."""
    # Dynamo accepts a function or a partial, and does not trace into either.
    return partial(create_selective_checkpoint_contexts, policy)


def unknown_operators(save: Sequence[str], ops: Collection[str]) -> dict[str, str]:
    """Find entries of ``save`` without a dot that match neither an op of these blocks nor an operator: entry -> error.

    Args:
        save: ops, or patterns of operator names, such as ``aten.mm``. An entry that begins with the name of a package
            is not checked here if the package is installed, because importing a kernel may register the operator
            later; if none is registered when the first block runs, that run raises the error.
        ops: ops that the blocks call.

    Raises:
        BuildError: an entry with a dot matches no operator, and does not begin with the name of an installed package.
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
            unknown[entry] = str(error)  # only blocks of another stage may use this op
    return unknown


def _may_come(pattern: str) -> bool:
    """Whether a package may register operators of this name once it is imported."""
    package, dot, _ = pattern.partition(".")
    return bool(dot) and package.isidentifier() and (package in sys.modules or find_spec(package) is not None)


def find_operators(pattern: str, ops: Collection[str] = ()) -> list[OpOverload]:
    """Find operators by name: all overloads of registered operators whose ``namespace.name`` matches.

    Args:
        pattern: pattern of the names.
        ops: further names to suggest in the error message.

    Raises:
        BuildError: no operator matches.
    """
    # torch.ops lists only operators that were used before. The dispatcher lists all, by a private function, which a
    # test pins.
    registered = {name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}  # noqa: SLF001
    matched = [name.partition(".") for name in sorted(fnmatch.filter(registered, pattern))]
    # A library may register kernels for operators that it does not define, such as torchao without its extension.
    found = (getattr(getattr(torch.ops, space), name, None) for space, _, name in matched)
    packets = [packet for packet in found if packet is not None]
    if not packets:
        near = difflib.get_close_matches(pattern, ops) or difflib.get_close_matches(pattern, sorted(registered))
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "names look like 'attention' or 'aten.mm'"
        here = f" (ops of the blocks: {', '.join(sorted(ops))})" if ops and "." not in pattern else ""
        raise BuildError(
            f"strategy 'activation_checkpointing': {pattern!r} in 'save' matches no operator; {hint}{here}"
        )
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
