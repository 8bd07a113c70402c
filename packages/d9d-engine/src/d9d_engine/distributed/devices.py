"""Choice of the device of a process, and CUDA's variables that must be set before CUDA starts."""

from __future__ import annotations

import os
from typing import Any

import torch
from d9d_core.errors import JobError
from torch import distributed as dist

__all__ = ["load_kernels_eagerly", "share_hardware_queues"]


def choose_device(name: str) -> torch.device:
    """Choose a device: ``auto`` is the accelerator that torch reports, or else the CPU; other names are torch's.

    Raises:
        JobError: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    available = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if name == "auto":
        return torch.device(available[-1])
    if not is_available(name):
        raise JobError(f"device: '{name}' is not available here; available: auto, {', '.join(available)}")
    return torch.device(name)


def own_backend(device: torch.device, blocks: int | None = None) -> dict[str, Any]:
    """Arguments of ``torch.distributed.new_group`` for a group for tensors of one device only.

    Args:
        device: device of the tensors.
        blocks: largest number of thread blocks (CTAs) of a collective's kernel; for NCCL only.
    """
    backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    if backend != "nccl" or blocks is None:
        return {"backend": backend}
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = blocks
    return {"backend": backend, "pg_options": options}


def load_kernels_eagerly(device: str) -> None:
    """Make CUDA load all kernels when it starts, unless it has started or the user has set ``CUDA_MODULE_LOADING``.

    With lazy loading, the first launch of a kernel may wait until the GPU is idle. A transfer that waits for another
    rank keeps the GPU busy, so two ranks could wait for each other forever (CUDA C++ Programming Guide, "Lazy
    Loading", section "Concurrent execution").

    Args:
        device: device as in the job file.
    """
    _set_before_cuda(device, "CUDA_MODULE_LOADING", "EAGER")


def share_hardware_queues(device: str) -> None:
    """Let streams share two hardware queues, unless CUDA runs or the user sets ``CUDA_DEVICE_MAX_CONNECTIONS``.

    With more queues, kernels start about a microsecond later while other streams wait, which transfer streams nearly
    always do (docs/notes.md). With two queues, transfers may wait for each other and for collectives of strategies.

    Args:
        device: device as in the job file.
    """
    _set_before_cuda(device, "CUDA_DEVICE_MAX_CONNECTIONS", "2")


def _set_before_cuda(device: str, variable: str, value: str) -> None:
    if device.partition(":")[0] in ("auto", "cuda") and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(variable, value)


def is_available(name: str) -> bool:
    """Whether this machine has the device with this name."""
    kind, _, index = name.partition(":")
    if kind in ("auto", "cpu"):
        return index in ("", "0")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or kind != accelerator.type:
        return False
    return not index or (index.isdigit() and int(index) < torch.accelerator.device_count())


def count_devices(name: str) -> int:
    """Number of processes that can each have a device here; 1 for the CPU and for a device name with an index."""
    device = intended_device(name)
    if device.type == "cpu" or ":" in name or not is_available(name):
        return 1
    return torch.accelerator.device_count()


def intended_device(name: str) -> torch.device:
    """Device that a job names, whether or not this machine has it; ``auto`` is a device of this machine.

    Raises:
        JobError: torch has no such device type.
    """
    if is_available(name):
        return choose_device(name)
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise JobError(f"device: torch knows no '{name}'; write auto, cpu, cuda, ...") from error


def device_of(name: str, local_rank: int, local_world_size: int) -> torch.device:
    """Choose the device of one of several processes on a machine, and make it the current device.

    Args:
        name: device as in the job file.
        local_rank: number of the process on its machine.
        local_world_size: number of processes on the machine.

    Raises:
        JobError: the machine has no such device or fewer devices than processes, or ``name`` is a single device for
            several processes.
    """
    device = choose_device(name)
    if device.type == "cpu":
        return device
    count = torch.accelerator.device_count()
    if ":" not in name:
        # Some launchers make only one device visible to each process.
        index = 0 if count == 1 else local_rank
        if index >= count:
            raise JobError(
                f"device: {local_world_size} processes on this machine, but {count} {device.type} devices; "
                "start one process for each device"
            )
        device = torch.device(device.type, index)
    elif local_world_size > 1:
        raise JobError(
            f"device: '{name}' is a single device, but there are {local_world_size} processes; set device to "
            f"'{device.type}', so that each process gets its own"
        )
    torch.accelerator.set_device_index(device)
    return device
