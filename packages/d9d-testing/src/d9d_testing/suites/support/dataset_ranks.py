"""Packs of a dataset, read in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d9d_core.data import DataContext
from torch import Tensor

from d9d_testing.suites.support.component import build_component


def packs(address: Sequence[Any], facts: Mapping[str, Any], cache: str, count: int) -> list[list[dict[str, Tensor]]]:
    """Read the first packs of a dataset.

    Args:
        address: arguments of :func:`build_component`.
        facts: fields of the :class:`DataContext`.
        cache: directory for prepared data.
        count: number of packs.
    """
    stream = build_component(*address, DataContext(**facts, cache_dir=Path(cache)))
    try:
        return [_copied(stream.next_pack()) for _ in range(count)]
    finally:
        if hasattr(stream, "close"):
            stream.close()


def _copied(pack: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: tensor.clone() for name, tensor in microbatch.items()} for microbatch in pack]
