"""Randomness keyed by seed and purpose, so that there is no generator state to save.

Every use derives its own seed: parameter initialisation from the module's name, a training step from its number. A
resumed run, or one with another layout, draws the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from d9d_core.errors import BuildError
from d9d_core.traits import LateInit


def derive_seed(seed: int, *keys: str | int) -> int:
    """A 63-bit seed from the job's seed and what it is for."""
    text = "\0".join(map(str, (seed, *keys)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, *keys: str | int) -> Iterator[None]:
    """Run a block with torch's default generators at a derived seed, and put them back afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, *keys))
        yield


def initialise(stage: nn.Module, seed: int) -> None:
    """Fill all parameters and buffers of a materialised stage, each module from a seed of its own name.

    Raises:
        BuildError: a module owns parameters but does not say how to fill them.
    """
    for name, module in stage.named_modules():
        owns = [*module._parameters, *module._buffers]  # noqa: SLF001 - there is no public "own tensors only, None included"
        if isinstance(module, LateInit):
            with seeded(seed, "init", name), torch.no_grad():
                module.reset_parameters()
        elif any(getattr(module, tensor) is not None for tensor in owns):
            kind = type(module).__name__
            raise BuildError(
                f"module '{name}' ({kind}) owns {', '.join(owns)} but has no reset_parameters(); "
                "its memory would stay uninitialised: implement the trait LateInit"
            )
