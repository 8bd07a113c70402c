from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

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
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton interpret the library's kernels, which call a function of CUDA's library."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from cut_cross_entropy import tl_utils
    from triton import language

    loops_that_count(monkeypatch)
    monkeypatch.setattr(tl_utils, "tl_log1p", lambda number: language.log(1 + number))


def loops_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of one number be bounds of loops: Triton 3.6 asks NumPy for what it has since refused."""
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
