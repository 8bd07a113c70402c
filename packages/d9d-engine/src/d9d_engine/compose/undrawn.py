"""Meta tensors without initial values: their modules' draws are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IN_PLACE = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_, Tensor.random_})


class Undrawn(TorchFunctionMode):
    """Mode in which drawing the values of a meta tensor does nothing, as it has none.

    torch runs such draws in Python on the meta device, and imports its compiler for the first: two seconds.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, unless it would only draw the values of a meta tensor."""
        given = dict(kwargs or {})
        if func in _IN_PLACE or getattr(func, "__module__", None) == torch.nn.init.__name__:
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **given)
