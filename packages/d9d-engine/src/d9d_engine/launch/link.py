"""Link between a launcher and a process that it started: two connected sockets, which end with either of them.

The launcher asks to stop; the process tells how far it is, that somebody else asked it to stop, and why it failed. No
file and no process number is involved, so that nothing is left behind whoever is killed. Imports no torch.
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

#: Number of the socket's descriptor in the environment of started processes.
VARIABLE = "D9D_LAUNCH_FD"


class Link:
    """One end of a link between a launcher and its process. Messages are JSON objects, one a line.

    Args:
        connection: connected to the other end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._unread = b""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Link | None:
        """Link to the launcher, in a process that ``d9d train --nproc`` started; processes it starts do not get it."""
        if VARIABLE not in environ:
            return None
        connection = socket.socket(fileno=int(environ[VARIABLE]))
        os.environ.pop(VARIABLE, None)
        connection.set_inheritable(False)
        return cls(connection)

    def send(self, **message: Any) -> None:
        """Send a message, unless the other end is gone. Not for signal handlers: it takes a lock."""
        with self._lock, suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Read what has come; waits if nothing has.

        Raises:
            EOFError: the other end is gone.
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
        """Tell why this process fails; the last one counts."""
        self.send(failure=asdict(failure))

    def echoes(self, first: str) -> None:
        """Tell that this process fails because another one did."""
        self.send(failure=None, first=first)
