"""Simplification of expressions: a mapper followed by its inverse leaves only renamed values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d9d_weights.graph.expressions import Converted, Joined, Permuted, Sliced, Squeezed, Unsqueezed, Value


def permuted(value: Value, dims: Sequence[int]) -> Value:
    """Expression for a value with reordered dimensions, simplified; ``dims`` as in torch's ``permute``."""
    if isinstance(value, Permuted):
        before = value.dims
        value, dims = value.of, [before[dim] for dim in dims]
    return value if list(dims) == list(range(len(dims))) else Permuted(value, tuple(dims))


def squeezed(value: Value, dim: int) -> Value:
    """Expression for a value without a dimension of size one, simplified."""
    return value.of if isinstance(value, Unsqueezed) and value.dim == dim else Squeezed(value, dim)


def unsqueezed(value: Value, dim: int) -> Value:
    """Expression for a value with another dimension of size one, simplified."""
    return value.of if isinstance(value, Squeezed) and value.dim == dim else Unsqueezed(value, dim)


def converted(value: Value, dtype: torch.dtype) -> Value:
    """Expression for a value in another dtype, simplified."""
    return value if value.spec.dtype == dtype else Converted(value, dtype)


def sliced(value: Value, dim: int, start: int, length: int) -> Value:
    """Slice of a value. A slice of a concatenation becomes a concatenation of slices of the overlapped parts."""
    if start == 0 and length == value.spec.shape[dim]:
        return value
    if isinstance(value, Sliced) and value.dim == dim:
        return Sliced(value.of, dim, value.start + start, length)
    if isinstance(value, Joined) and value.dim == dim:
        parts = value.inside(start, start + length)
        found = [sliced(part, dim, first, last - first) for part, _, first, last in parts]
        return joined(found, dim) if found else Sliced(value, dim, start, length)
    return Sliced(value, dim, start, length)


def joined(values: Sequence[Value], dim: int) -> Value:
    """Concatenation of values. Adjacent slices of the same value are merged into one slice."""
    merged: list[Value] = []
    for value in values:
        last = merged[-1] if merged else None
        if (
            isinstance(value, Sliced)
            and isinstance(last, Sliced)
            and value.of is last.of
            and value.dim == last.dim == dim
            and last.start + last.length == value.start
        ):
            merged[-1] = sliced(value.of, dim, last.start, last.length + value.length)
        else:
            merged.append(value)
    return merged[0] if len(merged) == 1 else Joined(tuple(merged), dim)
