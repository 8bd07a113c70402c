"""Communicators of process groups: release of their device memory, and its return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from d9d_core.errors import BuildError
from torch import distributed as dist

from d9d_engine.distributed.world import process_groups


def suspend() -> int:
    """Release the device memory of all communicators of this process; none may be used until :func:`resume`.

    Their groups stay the same objects, and their connections stay. Collective over all ranks; nothing may be on its
    way. NCCL has this from 2.29.7 on (``ncclCommSuspend``), torch as ``Backend.suspend``.

    Returns:
        Number of communicators; those of the CPU, such as gloo's, have nothing on a device and do not count.

    Raises:
        BuildError: this torch cannot.
    """
    backends = list(_of_devices())
    for backend in backends:  # all are asked before one is suspended
        if not hasattr(backend, "suspend"):
            raise BuildError(
                f"sleep('communicators'): {type(backend).__name__} of torch {torch.__version__} cannot release its "
                "memory; use a newer torch, or leave 'communicators' out"
            )
    for backend in backends:
        backend.suspend()
    return len(backends)


def resume() -> None:
    """Take the device memory of all communicators back. Collective over all ranks."""
    for backend in _of_devices():
        backend.resume()


def _of_devices() -> Iterator[Any]:
    for group in process_groups():
        # Private, so a test pins them: torch has no public list of a group's backends.
        for device in group._device_types:  # noqa: SLF001
            backend = group._get_backend(device)  # noqa: SLF001
            # gloo answers for accelerators, too, and has nothing on them.
            if device.type != "cpu" and not (dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)):
                yield backend
