"""Real samples of one pass over a dataset, without the fillers that complete the last batch."""

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

#: Key of the index of the first row at each place of a microbatch; see :mod:`d9d_core.data`.
ROWS = "rows"


class RealSamples:
    """Data stream of one pass that records, on the host, which entries of each microbatch are real samples.

    Packs are inspected when they are fetched, maybe in another thread and ahead of :meth:`take`.

    Args:
        stream: stream that makes one pass.
        where: field of the job file with the dataset.
        limit: count only samples that begin in the first ``limit`` rows of the dataset; ``None`` counts all.

    Raises:
        DataError: the stream does not make a single pass, or has no samples.
    """

    def __init__(self, stream: DataStream, where: str, limit: int | None = None) -> None:
        if not isinstance(stream.facts.get(ROWS), int):
            raise DataError(
                f"{where}: this dataset cannot make one pass over all of its samples in order (its stream has no fact "
                f"'{ROWS}'); evaluate a number of batches instead, such as 'packs: 8'"
            )
        samples = stream.facts.get("samples")
        if not isinstance(samples, int) or samples < 1:
            raise DataError(f"{where}: there are no samples to make a pass over; use other data")
        self._stream = stream
        self._limit = limit
        self._taken: deque[list[list[int]]] = deque()
        #: Number of real samples in the pass.
        self.samples = samples if limit is None else min(samples, limit)

    @property
    def facts(self) -> State:
        return self._stream.facts

    def next_pack(self) -> Pack:
        pack = self._stream.next_pack()
        self._taken.append([self._places(microbatch) for microbatch in pack])
        return pack

    def take(self) -> list[list[int]]:
        """Indices of the real samples in each microbatch of the oldest pack that this method has not returned yet."""
        return self._taken.popleft()

    def _places(self, microbatch: Microbatch) -> list[int]:
        firsts = microbatch[ROWS].tolist()
        texts = len(firsts) // len(microbatch["samples"]) if "samples" in microbatch else 1
        limit = math.inf if self._limit is None else self._limit
        # All texts of a sample are real or none.
        return [place for place in range(len(firsts)) if 0 <= firsts[place - place % texts] < limit]

    def state(self) -> State:
        return self._stream.state()

    def load_state(self, state: State) -> None:
        self._stream.load_state(state)
        self._taken.clear()

    def save_assets(self, directory: Path) -> None:
        """Write the files of the data that an exported model needs, such as the tokenizer."""
        self._stream.save_assets(directory)


def only(tensors: Mapping[str, Tensor], microbatch: Microbatch, places: Sequence[int]) -> dict[str, Tensor]:
    """Select real samples, by index, from a microbatch or from a model's outputs. Does not wait for the device.

    Args:
        tensors: name -> tensor with B entries along dim 0, or with B / T samples if each has T texts; tensors of other
            sizes are returned unchanged.
        microbatch: microbatch with ``rows`` [B].
        places: indices of the entries to select, in order; at least one.
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
