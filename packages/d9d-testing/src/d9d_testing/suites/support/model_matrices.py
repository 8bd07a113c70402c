"""Matrices of a model in the layout in which its forward uses them, and modules that write to its residual stream.

Shapes: B samples, S positions, H features.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.traits import HasBlocks, modules_with
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: Operator -> index of the argument that is the right factor [in, out] of a product.
_PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::bmm": 1}


class MatrixUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records parameters of a model used as right factors of matrix products.

    Args:
        model: model whose parameters are recorded.

    Attributes:
        found: parameter -> distinct right factors [in, out] that are views of it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = model.named_parameters(remove_duplicate=False)
        self._storages = {parameter.untyped_storage().data_ptr(): name for name, parameter in named}
        self.found: dict[str, list[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the right factor of a product, and run the operator."""
        place = _PRODUCTS.get(func.name().partition(".")[0])
        if place is not None:
            factor = args[place]
            name = self._storages.get(factor.untyped_storage().data_ptr())
            if name is not None:
                known = self.found.setdefault(name, [])
                for matrix in factor.unbind(0) if factor.ndim == 3 else [factor]:
                    if not any(matrix.shape == other.shape and torch.equal(matrix, other) for other in known):
                        known.append(matrix)
        return func(*args, **(kwargs or {}))


def residual_writers(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Standard deviations of the outputs of modules that write to the residual stream, by module name.

    These modules are the direct children of a block whose outputs add up to the block's change of its input.
    """
    blocks = {
        f"{owner}.{name}".lstrip("."): block
        for owner, module in modules_with(model, HasBlocks).items()
        for name, block in module.blocks().items()
    }
    seen: dict[str, dict[str, Tensor]] = {name: {} for name in blocks}
    hooks = []
    for name, block in blocks.items():
        watched = {"": block, **dict(block.named_children())}
        for child, module in watched.items():
            record = _recorder(seen[name], child)
            hooks.append(module.register_forward_hook(record, with_kwargs=True))
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return {
        f"{name}.{child}": parts[child].std().item()
        for name, parts in seen.items()
        if "" in parts and "input" in parts
        for child in _summands(parts)
    }


def _recorder(into: dict[str, Tensor], child: str) -> Any:
    def record(_module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        value = _first_tensor([output])
        if value is not None:
            into[child] = value.detach().clone()
        given = _first_tensor([*args, *kwargs.values()])
        if not child and given is not None:
            into["input"] = given.detach().clone()

    return record


def _first_tensor(values: Any) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, Mapping):
            return _first_tensor(value.values())
        if isinstance(value, tuple | list):
            return _first_tensor(value)
    return None


def _summands(parts: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Smallest set of children whose outputs add up to the block's change of its input; empty if there is none."""
    if parts[""].shape != parts["input"].shape:
        return ()
    added = parts[""] - parts["input"]
    children = [name for name, value in parts.items() if name not in ("", "input") and value.shape == added.shape]
    for count in (1, 2, 3):
        for chosen in itertools.combinations(children, count):
            total = torch.stack([parts[name] for name in chosen]).sum(0)
            if torch.allclose(total, added, rtol=1e-3, atol=1e-5 * max(1.0, added.abs().max().item())):
                return chosen
    return ()
