"""Release and return of a trainer's device memory by tags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, get_args

import torch
from d9d_core.errors import TrainingError
from torch import Tensor

from d9d_engine.sleep.communicators import resume, suspend
from d9d_engine.sleep.offload import Offloaded, offload

#: Tags of memory. ``weights``: parameters and buffers of all models; ``optimizer``: optimizer state and gradients;
#: ``communicators``: memory of NCCL.
Tag = Literal["weights", "optimizer", "communicators"]
TAGS: tuple[Tag, ...] = get_args(Tag)


class Sleeper:
    """Releases a trainer's device memory, and allocates it again.

    Args:
        tensors: tag -> function that returns the current tensors.
        device: device of the trainer.
    """

    def __init__(self, tensors: Mapping[Tag, Callable[[], Iterable[Tensor]]], device: torch.device) -> None:
        self._tensors = dict(tensors)
        self._device = device
        self._asleep: dict[Tag, Offloaded | None] = {}

    @property
    def asleep(self) -> tuple[Tag, ...]:
        """Tags whose memory is released."""
        return tuple(self._asleep)

    def settle(self, tags: Collection[str]) -> list[Tag]:
        """Check tags and sort them into the order of release; without tags, return all.

        Raises:
            TrainingError: a tag is not in :data:`TAGS`.
        """
        if unknown := [tag for tag in tags if tag not in TAGS]:
            raise TrainingError(f"'{unknown[0]}' is no tag of memory to release; choose among {', '.join(TAGS)}")
        return [tag for tag in TAGS if not tags or tag in tags]

    def sleep(self, tags: Iterable[Tag]) -> int:
        """Release the memory of these tags, unless they are asleep; return the number of bytes that tensors released.

        Collective over all ranks if ``communicators`` is among the tags. Waits for the device. After a failure, the
        tags that this call put to sleep are awake again.

        Raises:
            BuildError: this version of torch cannot release communicators.
        """
        fresh = [tag for tag in tags if tag not in self._asleep]
        try:
            freed = self._release(fresh)
        except BaseException:
            self.wake(fresh)
            raise
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        return freed

    def _release(self, tags: Iterable[Tag]) -> int:
        freed = 0
        for tag in tags:
            if tag == "communicators":
                suspend()
                self._asleep[tag] = None
                continue
            offloaded = offload(tensor for tensor in self._tensors[tag]() if tensor.device.type == self._device.type)
            self._asleep[tag] = offloaded
            freed += offloaded.bytes
        return freed

    def wake(self, tags: Iterable[Tag]) -> int:
        """Allocate and restore the memory of these tags, unless they are awake; return the number of restored bytes.

        Collective over all ranks if ``communicators`` is among the tags. Waits for the device.

        Raises:
            torch.OutOfMemoryError: device memory is too small; nothing is lost, and the call can be repeated.
        """
        taken = 0
        for tag in tags:
            if tag not in self._asleep:
                continue
            offloaded = self._asleep[tag]
            if offloaded is None:
                resume()
            else:
                taken += offloaded.bytes
                offloaded.restore()
            del self._asleep[tag]
        return taken
