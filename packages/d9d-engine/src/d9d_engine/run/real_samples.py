"""Samples and fillers of one pass: which places of a microbatch count."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from d9d_core.data import DataStream
from d9d_core.errors import DataError
from d9d_core.types import Microbatch, Pack, State
from torch import Tensor

#: Number of the first row in each place of a microbatch, see :mod:`d9d_core.data`.
ROWS = "rows"


class RealSamples:
    """Stream of one pass that remembers, on the host, which places of each microbatch count: those without a filler.

    Packs are looked at where they are read, which may be in another thread and ahead of :meth:`take`.

    Args:
        stream: makes one pass.
        where: field of the job file that it is from.
        limit: only samples whose first row is below this count; ``None`` for all.

    Raises:
        DataError: the stream makes none, or there are no samples.
    """

    def __init__(self, stream: DataStream, where: str, limit: int | None = None) -> None:
        if not isinstance(stream.facts.get(ROWS), int):
            raise DataError(
                f"{where}: this dataset makes no pass over all of its samples in order (its stream has no fact "
                f"'{ROWS}'); take a number of batches instead, such as 'packs: 8'"
            )
        samples = stream.facts.get("samples")
        if not isinstance(samples, int) or samples < 1:
            raise DataError(f"{where}: there are no samples to make a pass over; use other data")
        self._stream = stream
        self._limit = limit
        self._taken: deque[list[list[int]]] = deque()
        #: Number of samples after which none counts.
        self.samples = samples if limit is None else min(samples, limit)

    @property
    def facts(self) -> State:
        """Facts of the stream."""
        return self._stream.facts

    def next_pack(self) -> Pack:
        """Next pack of the stream."""
        pack = self._stream.next_pack()
        self._taken.append([self._places(microbatch) for microbatch in pack])
        return pack

    def take(self) -> list[list[int]]:
        """Places that count in each microbatch of the oldest pack that was not asked about."""
        return self._taken.popleft()

    def _places(self, microbatch: Microbatch) -> list[int]:
        firsts = microbatch[ROWS].tolist()
        texts = len(firsts) // len(microbatch["samples"]) if "samples" in microbatch else 1
        limit = math.inf if self._limit is None else self._limit
        # The texts of a sample count together.
        return [place for place in range(len(firsts)) if 0 <= firsts[place - place % texts] < limit]

    def state(self) -> State:
        """Position of the stream."""
        return self._stream.state()

    def load_state(self, state: State) -> None:
        """Continue at ``state``."""
        self._stream.load_state(state)
        self._taken.clear()

    def save_assets(self, directory: Path) -> None:
        """Write what an exported model needs from the data."""
        self._stream.save_assets(directory)


def only(tensors: Mapping[str, Tensor], microbatch: Microbatch, places: Sequence[int]) -> dict[str, Tensor]:
    """Take only real samples, by place, of a microbatch or of a model's outputs for it. Does not wait for the device.

    Args:
        tensors: of B places along dim 0, or of the B / T samples where a sample has T texts; others stay as they are.
        microbatch: has ``rows`` [B].
        places: the numbers to take, in order; at least one.
    """
    count = len(microbatch[ROWS])
    samples = len(microbatch["samples"]) if "samples" in microbatch else count
    of_samples = sorted({place * samples // count for place in places})

    def taken(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] not in (count, samples):
            return tensor
        chosen = places if tensor.shape[0] == count else of_samples
        if list(chosen) == list(range(chosen[0], chosen[-1] + 1)):
            return tensor[chosen[0] : chosen[-1] + 1]
        index = torch.tensor(chosen)
        if tensor.device.type == "cuda":
            index = index.pin_memory().to(tensor.device, non_blocking=True)
        return tensor.index_select(0, index)

    return {name: taken(tensor) for name, tensor in tensors.items()}
