"""Release and return of the device memory of process groups' communicators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from d9d_core.errors import BuildError
from torch import distributed as dist

from d9d_engine.distributed.world import process_groups


def suspend() -> int:
    """Release the device memory of all communicators of this process, which must not be used until :func:`resume`.

    Process groups stay the same objects, and connections stay open. No communication may be pending. Collective over
    all ranks. Needs NCCL 2.29.7 (``ncclCommSuspend``) and a torch with ``Backend.suspend``.

    Returns:
        Number of released communicators, without CPU communicators such as gloo's, which have no device memory.

    Raises:
        BuildError: this version of torch cannot release communicators.
    """
    backends = list(_of_devices())
    for backend in backends:  # check all before suspending any
        if not hasattr(backend, "suspend"):
            raise BuildError(
                f"sleep('communicators'): {type(backend).__name__} of torch {torch.__version__} cannot release its "
                "memory; use a newer torch, or leave 'communicators' out"
            )
    for backend in backends:
        backend.suspend()
    return len(backends)


def resume() -> None:
    """Allocate the device memory of all communicators again. Collective over all ranks."""
    for backend in _of_devices():
        backend.resume()


def _of_devices() -> Iterator[Any]:
    for group in process_groups():
        # torch has no public list of a group's backends; a test detects changes of these private names.
        for device in group._device_types:  # noqa: SLF001
            backend = group._get_backend(device)  # noqa: SLF001
            # gloo may be the backend for accelerators, too, but has no memory there.
            if device.type != "cpu" and not (dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)):
                yield backend
