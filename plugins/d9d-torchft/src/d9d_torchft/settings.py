"""Settings of one replica from environment variables: they differ between replicas, or are secret."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from d9d_core.errors import JobError

LIGHTHOUSE = "D9D_TORCHFT_LIGHTHOUSE"
REPLICA = "D9D_TORCHFT_REPLICA"
TOKEN_FILE = "D9D_TORCHFT_TOKEN_FILE"  # noqa: S105 - the name of a variable
LOOPBACK = "127.0.0.1"
#: Smallest length of a token in bytes.
_SHORTEST = 16
#: Request of ``ioctl`` for the address of an interface (Linux).
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one replica.

    Attributes:
        lighthouse: address of the lighthouse, such as ``http://10.0.0.1:29510``.
        replica: name of this replica, unique in the job.
        token: secret that all replicas of the job share.
    """

    lighthouse: str
    replica: str
    token: bytes = field(repr=False)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings from environment variables.

        Raises:
            JobError: a variable is missing or wrong; the text has one line for each.
        """
        problems = []
        lighthouse, replica = environ.get(LIGHTHOUSE, ""), environ.get(REPLICA, "")
        if not re.fullmatch(r"http://\S+:\d+", lighthouse):
            problems.append(f"{LIGHTHOUSE} is '{lighthouse}'; set it to the lighthouse's address, http://HOST:PORT")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", replica):
            problems.append(f"{REPLICA} is '{replica}'; set it to this replica's name: letters, digits, '.', '_', '-'")
        file, token = environ.get(TOKEN_FILE, ""), b""
        try:
            token = Path(file).read_bytes().strip() if file else b""
        except OSError as error:
            problems.append(f"{TOKEN_FILE}: '{file}' cannot be read ({error.strerror}); name a file with a secret")
        else:
            if not file:
                problems.append(f"{TOKEN_FILE} is not set; name a file with a secret")
            elif len(token) < _SHORTEST:
                problems.append(f"{TOKEN_FILE}: the token has {len(token)} bytes; write at least {_SHORTEST}")
        if problems:
            hint = "strategy torchft: start the replicas with d9d torchft run, or set for each of them:"
            raise JobError("\n".join([hint, *problems]))
        return cls(lighthouse, replica, token)


def address_of(interface: str | None) -> str:
    """Numeric IPv4 address of a network interface of this machine; for ``None``, of the loopback.

    Raises:
        JobError: the interface does not exist or has no such address.
    """
    if interface is None:
        return LOOPBACK
    if sys.platform != "linux":
        raise JobError(f"strategy torchft: interface '{interface}' can be resolved on Linux only; remove the field")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise JobError(
                f"strategy torchft: interface '{interface}' has no IPv4 address ({error.strerror}); name one of {names}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
