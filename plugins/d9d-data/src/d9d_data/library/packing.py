"""Grouping of the microbatches of any loader into packs of a fixed number of microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Generic, TypeVar

M = TypeVar("M")


class FixedCountPacker(Generic[M]):
    """Packer of a loader's microbatches into packs of equal count, such as the microbatches of an optimizer step.

    Args:
        loader: loader of microbatches, such as a ``torch.utils.data.DataLoader``. Each iteration over the packs
            iterates once over the loader.
        count: number of microbatches in a pack.
        drop_last: leave out an incomplete last pack.

    Raises:
        ValueError: the count is below 1.
    """

    def __init__(self, loader: Iterable[M], count: int, drop_last: bool = True) -> None:
        if count < 1:
            raise ValueError(f"count, the number of microbatches of a pack, is {count}; use at least 1")
        self._loader = loader
        self._count = count
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[list[M]]:
        pack: list[M] = []
        for microbatch in self._loader:
            pack.append(microbatch)
            if len(pack) == self._count:
                yield pack
                pack = []
        if pack and not self._drop_last:
            yield pack

    def __len__(self) -> int:
        """Number of packs.

        Raises:
            TypeError: the loader has no length.
        """
        if not isinstance(self._loader, Sized):
            raise TypeError(
                f"{type(self._loader).__name__} has no length, so the number of packs is unknown; give it __len__()"
            )
        size = len(self._loader)
        return size // self._count if self._drop_last else -(-size // self._count)
