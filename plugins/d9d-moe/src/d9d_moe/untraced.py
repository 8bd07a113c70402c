"""Code that compilers leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """``torch.compile`` breaks the graph around the function, calls it as it is, and does not look inside.

    For communication that is awaited elsewhere, which Dynamo would follow only to give up half-way. Using it costs the
    import of Dynamo.
    """
    opaque: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return opaque
