from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch, loops_that_count: None) -> None:
    """Let Triton interpret the library's kernels, which call a function of CUDA's library."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from cut_cross_entropy import tl_utils
    from triton import language

    monkeypatch.setattr(tl_utils, "tl_log1p", lambda number: language.log(1 + number))
