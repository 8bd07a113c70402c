"""Counter of torch operators."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public interface that sees operators


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts the torch operators of this thread, collectives included, and of CPU backwards.

    Attributes:
        counts: operator name, such as ``aten.mm`` or ``c10d.allreduce_`` -> number of calls.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operator, and run it."""
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))
