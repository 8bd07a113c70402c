"""Random numbers keyed by seed and purpose, so that there is no generator state to save.

Every use derives its own seed: parameter initialisation from the module's name, a training step from its number. A
resumed run, or one with another layout, draws the same numbers.
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
    """A 63-bit seed from the job's seed and what it is for."""
    text = "\0".join(map(str, (seed, *keys)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class MicrobatchSeeds:
    """Seeds of a microbatch's random numbers, as for dropout: from the step, its first sample, the stage and the part.

    Ranks of ``cp`` have parts of the same samples; with one seed, their positions would share each dropout.

    Attributes:
        seed: of the job.
        first: position in the batch of this rank's first sample.
        microbatch_size: samples in a microbatch.
        part: coordinate of this rank along ``cp``.
    """

    seed: int
    first: int
    microbatch_size: int
    part: int

    def __call__(self, step: int, index: int, stage: int) -> int:
        """Seed of microbatch ``index`` of this rank on a stage."""
        keys: list[str | int] = ["step", step, "sample", self.first + index * self.microbatch_size]
        keys += ["stage", stage] if stage else []  # without pipeline and context parallelism, the keys of one process
        keys += ["part", self.part] if self.part else []
        return derive_seed(self.seed, *keys)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed what is drawn on the CPU and on this device: by torch, Python's ``random`` and NumPy's global generator.

    ``torch.manual_seed`` asks all kinds of devices, and those that have not started write down the stack of who asked,
    which takes 0.07 ms or more where this takes 0.001.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what code of users draws from


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Put global generators back after the block: torch's of the CPU and the device, Python's and NumPy's."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
