"""Link between the launcher and a process that it started: a pair of connected sockets.

The launcher sends stop requests; the process sends its progress, stop signals it received, and its failure. Sockets end
with the processes, so nothing is left behind if either is killed. Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from d9d_engine.supervision.failure import Failure

#: Environment variable of started processes with the socket's file descriptor.
VARIABLE = "D9D_LAUNCH_FD"


class Link:
    """One end of a link between the launcher and a process. Each message is a JSON object in one line.

    Args:
        connection: socket connected to the other end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._unread = b""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Link | None:
        """Link to the launcher if ``d9d train --nproc`` started this process; child processes do not inherit it."""
        if VARIABLE not in environ:
            return None
        connection = socket.socket(fileno=int(environ[VARIABLE]))
        os.environ.pop(VARIABLE, None)
        connection.set_inheritable(False)
        return cls(connection)

    def send(self, **message: Any) -> None:
        """Send a message, unless the other end is closed. Do not call it in signal handlers: it takes a lock."""
        with self._lock, suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the received messages; waits if there are none.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            data = self.connection.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        yield from map(json.loads, lines)

    def failed(self, failure: Failure) -> None:
        """Report the failure of this process to the launcher; a later report replaces an earlier one."""
        self.send(failure=asdict(failure))

    def echoes(self, first: str) -> None:
        """Report that this process fails because the rank named ``first`` failed."""
        self.send(failure=None, first=first)
