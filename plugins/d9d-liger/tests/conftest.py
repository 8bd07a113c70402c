from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch, loops_that_count: None) -> None:
    """Let Triton interpret the library's kernels, which take more for granted than its interpreter has.

    They call methods of numbers, which are tensors in a kernel that was compiled, and a function of CUDA's library.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import liger_kernel.ops.rms_norm as library
    from triton import language
    from triton.runtime import interpreter

    np = pytest.importorskip("numpy")  # as the interpreter needs it
    converted = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if not isinstance(argument, float):
            return converted(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    # Looked up when it is called: the interpreter replaces the functions of the language while it runs.
    monkeypatch.setattr(library, "rsqrt", lambda number: language.rsqrt(number))  # noqa: PLW0108
