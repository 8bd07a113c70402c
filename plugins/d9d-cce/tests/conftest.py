from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """These tensors are tiny: threads that wait for each other on busy cores cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch, loops_that_count: None) -> None:
    """Let Triton interpret the library's kernels, which call a function of CUDA's library."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from cut_cross_entropy import tl_utils
    from triton import language

    monkeypatch.setattr(tl_utils, "tl_log1p", lambda number: language.log(1 + number))
