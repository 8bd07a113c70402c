"""Checks of the machine for ``d9d doctor``, without torch: versions, memory, disks, and shared memory."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from d9d_core.health import Health

_GIB = 2**30
#: Free bytes of a disk below which a warning is printed: the size of a small model's checkpoint with optimizer state.
_SCARCE = 5 * _GIB
#: Size of shared memory in bytes below which data workers and NCCL fail; Docker's default is 64 MiB.
_SMALL = _GIB


def machine(verbose: bool = False) -> Iterator[tuple[str, Health]]:
    """Yield name and outcome of each check of the machine.

    Args:
        verbose: include the check of shared memory even if the memory is large enough.
    """
    yield "python", Health(True, f"Python {platform.python_version()}, d9d {version('d9d-core')}")
    if (memory := _memory(Path("/"))) is not None:
        yield "memory", Health(True, memory)
    yield "disk", _disk(Path.cwd(), Path(tempfile.gettempdir()))
    shared = _shared(Path("/dev/shm"))  # noqa: S108 - the mount is examined, not used
    if shared is not None and (verbose or shared.advice):
        yield "shared memory", shared


def _memory(root: Path) -> str | None:
    """Total and available memory as text; ``None`` if the system does not tell.

    Args:
        root: root of the file system.
    """
    values: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            values[name] = int(value.split()[0]) * 1024
    if "MemTotal" not in values:
        with suppress(ValueError, OSError, AttributeError):
            return f"{_gib(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))}"
        return None
    text = f"{_gib(values['MemTotal'])}, {_gib(values.get('MemAvailable', 0))} available"
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())
        if limit < values["MemTotal"]:
            text += f"; this container may use {_gib(limit)}"
    return text


def _disk(here: Path, temporary: Path) -> Health:
    free = {
        "in the current directory": shutil.disk_usage(here).free,
        f"in {temporary}": shutil.disk_usage(temporary).free,
    }
    text = ", ".join(f"{_gib(count)} free {place}" for place, count in free.items())
    scarce = [place for place, count in free.items() if count < _SCARCE]
    if not scarce:
        return Health(True, text)
    return Health(True, text, f"make room {' and '.join(scarce)}, or set run.dir and TMPDIR to another disk")


def _shared(mount: Path) -> Health | None:
    """Size of the shared memory; ``None`` if the system has no such mount."""
    try:
        usage = shutil.disk_usage(mount)
    except OSError:
        return None
    text = f"{_gib(usage.total)}, {_gib(usage.free)} free in {mount}"
    if usage.total >= _SMALL:
        return Health(True, text)
    return Health(True, text, "data workers and NCCL may fail; start the container with --shm-size=8g or --ipc=host")


def _gib(count: int) -> str:
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB / 10 else f"{count / 2**20:,.0f} MiB"
