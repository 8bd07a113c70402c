"""Settings that make torch compute bitwise the same results in each run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from d9d_core.errors import JobError

#: Environment variable with the workspace sizes of cuBLAS, and its two values with which results are deterministic.
_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_SIZES = (":4096:8", ":16:8")


def prepare_determinism(device: str) -> None:
    """Set the environment variable that makes cuBLAS deterministic, before CUDA is initialised.

    Args:
        device: device as in the job file.

    Raises:
        JobError: CUDA is already initialised, or the variable has another value.
    """
    if device.partition(":")[0] not in ("auto", "cuda") or not torch.cuda.is_available():
        return
    given = os.environ.get(_VARIABLE)
    if given in _SIZES:
        return
    remedy = f"start with {_VARIABLE}={_SIZES[0]} in the environment: {_VARIABLE}={_SIZES[0]} d9d train JOB"
    if given is not None:
        raise JobError(f"deterministic: {_VARIABLE} is '{given}', with which cuBLAS is not deterministic; {remedy}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise JobError(f"deterministic: CUDA was started by this process without {_VARIABLE}; {remedy}")
    os.environ[_VARIABLE] = _SIZES[0]


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Make torch use only deterministic algorithms inside the block, if enabled; an op without one raises.

    Uninitialised tensors are not filled: the engine never reads them, and filling costs time.
    """
    if not enabled:
        yield
        return
    cudnn = torch.backends.cudnn
    fills: Any = torch.utils.deterministic  # its settings are properties
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark, fills.fill_uninitialized_memory = True, False, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        cudnn.deterministic, cudnn.benchmark, fills.fill_uninitialized_memory = before
