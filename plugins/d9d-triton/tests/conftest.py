from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from d9d_nn.ops.linear_cross_entropy import IGNORE
from torch import Tensor

GIB = 2**30


@pytest.fixture
def large() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Function that draws hidden states, a weight and targets of the size of a model, on the GPU."""

    def drawn(tokens: int = 8192, words: int = 151_936) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        hidden, weight = (
            torch.randn(n, 2048, device="cuda", generator=generator, dtype=torch.bfloat16) for n in (tokens, words)
        )
        targets = torch.randint(words, (tokens,), device="cuda", generator=generator)
        targets[1::7] = IGNORE
        return hidden.requires_grad_(), (weight / 30).requires_grad_(), targets

    return drawn


@pytest.fixture
def need() -> Callable[[int], None]:
    """Function that skips the test unless so many bytes of the GPU's memory are free."""

    def checked(memory: int) -> None:
        gc.collect()  # what other tests left must not go while a test measures
        if torch.cuda.mem_get_info()[0] < memory:
            pytest.skip(f"needs {memory / GIB:.0f} GiB of free device memory")

    return checked
