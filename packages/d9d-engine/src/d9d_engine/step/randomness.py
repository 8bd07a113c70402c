"""Random numbers keyed by seed and purpose, so that no generator state must be saved.

Each use derives its own seed: parameter initialisation from the module's name, a training step from its number. A
resumed run, or a run in another layout, draws the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


def derive_seed(seed: int, *keys: str | int) -> int:
    """Derive a 63-bit seed from the job's seed and keys that name the use."""
    text = "\0".join(map(str, (seed, *keys)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class MicrobatchSeeds:
    """Seeds of a microbatch's random numbers, such as for dropout, by step, first sample, stage and ``cp`` rank.

    Ranks of ``cp`` have parts of the same samples; with equal seeds, their positions would get equal dropout masks.

    Attributes:
        seed: seed of the job.
        first: index in the batch of this rank's first sample.
        microbatch_size: number of samples in a microbatch.
        part: coordinate of this rank along ``cp``.
    """

    seed: int
    first: int
    microbatch_size: int
    part: int

    def __call__(self, step: int, index: int, stage: int) -> int:
        """Seed for this rank's microbatch ``index`` on a stage."""
        keys: list[str | int] = ["step", step, "sample", self.first + index * self.microbatch_size]
        keys += ["stage", stage] if stage else []  # without pipeline and context parallelism, the keys of one process
        keys += ["part", self.part] if self.part else []
        return derive_seed(self.seed, *keys)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed all global generators: torch's of the CPU and this device, Python's ``random`` and NumPy's.

    ``torch.manual_seed`` would seed all device types, and record a stack trace for each uninitialised one: 0.07 ms or
    more instead of 0.001.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code may draw from it


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore global generators after the block: torch's of the CPU and the device, Python's and NumPy's."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
