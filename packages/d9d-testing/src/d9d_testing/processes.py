"""Processes of a job, read from ``/proc``, for tests that kill them. Linux only."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

#: Loopback addresses in the notation of :func:`listening_at`.
LOOPBACK = frozenset({"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"})
_GONE = (FileNotFoundError, ProcessLookupError)
_LISTENING = "0A"


def children_of(pid: int) -> list[int]:
    """Ids of the children of a process, of all its threads; includes ended ones that have not been waited for."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(*_GONE):  # the thread may have ended
            found += [int(word) for word in file.read_text().split()]
    return found


def descendants_of(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    children = children_of(pid)
    return children + [one for child in children for one in descendants_of(child)]


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process id, from the children of a launcher."""
    found = {}
    for child in children_of(launcher):
        with suppress(*_GONE, PermissionError):  # the process may have ended
            if match := re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{child}/environ").read_bytes()):
                found[int(match[1])] = child
    return found


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    with suppress(*_GONE):
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    return False


def listening_at(pid: int) -> list[str]:
    """Addresses, in hexadecimal digits, on which a process accepts TCP connections."""
    links = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(*_GONE):  # the file may have been closed
            links.append(str(file.readlink()))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1].split(":")[0] for row in rows if row[3] == _LISTENING and f"socket:[{row[9]}]" in links]
