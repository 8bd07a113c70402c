"""Bringing packs to the device."""

from __future__ import annotations

import torch

from d9d_core.protocols import DataStream, Pack


class Feed:
    """Takes packs from a stream and copies them to the device without waiting for the copy.

    Args:
        stream: yields packs of CPU tensors.
        device: where the model is.
    """

    def __init__(self, stream: DataStream, device: torch.device) -> None:
        self.stream = stream
        self._device = device

    def next(self) -> Pack:
        """The next pack, on the device."""
        pack = self.stream.next_pack()
        if self._device.type == "cpu":
            return pack
        # Only copies from pinned memory are asynchronous.
        return [
            {name: tensor.pin_memory().to(self._device, non_blocking=True) for name, tensor in microbatch.items()}
            for microbatch in pack
        ]
