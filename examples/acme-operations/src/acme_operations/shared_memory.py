"""Health check ``shared_memory``: containers often start with 64 MiB, with which data workers and NCCL fail."""

from __future__ import annotations

import shutil
from pathlib import Path

from d9d_core.health import Health

_MIB = 2**20


def run(directory: Path = Path("/dev/shm"), least_mib: int = 512) -> Health:  # noqa: S108 - the place of shared memory
    """Size of the file system for shared memory.

    Args:
        directory: place where it is mounted.
        least_mib: smallest sufficient size, in MiB.
    """
    if not directory.is_dir():
        return Health(True, f"no {directory} on this machine")
    total = shutil.disk_usage(directory).total // _MIB
    text = f"{directory} has {total:,} MiB"
    if total >= least_mib:
        return Health(True, text)
    return Health(False, f"{text}, less than {least_mib}", "start the container with --shm-size=1g or --ipc=host")
