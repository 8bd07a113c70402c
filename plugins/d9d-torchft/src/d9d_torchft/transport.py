"""Transport of state from one replica to another: authenticated by a token; JSON and raw bytes, no pickle.

A connection, with ``mac(label)`` = HMAC-SHA256 of the label and both nonces under the token:

    server -> client    nonce (32 bytes)
    client -> server    nonce (32 bytes), mac("client")
    server -> client    mac("server"); zeros if the client's is wrong, and the connection ends
    client -> server    length (8 bytes), request as JSON
    server -> client    length (8 bytes), header as JSON, then the bytes of each tensor in the header's order

Neither side sends anything else before it has checked the other one, and the token itself is never sent. The contents
are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Name and version of the protocol; part of each mac.
_PROTOCOL = b"d9d-torchft/1/"
_NONCE, _MAC = 32, 32
#: Largest sizes in bytes of a request and of a header.
_REQUEST, _HEADER = 2**12, 2**28
#: Seconds within which a connection and its handshake must be complete.
_SECONDS = 10.0
#: Largest number of connections that are served at the same time.
_CONNECTIONS = 64


class TransportError(Exception):
    """The other replica is not authentic, or sent something that does not fit."""


@dataclass(frozen=True)
class Offer:
    """State that a server sends to every client that asks for its key.

    Attributes:
        key: key of the attempt in which the state is taken.
        values: JSON values.
        tensors: name -> tensor, not copied.
    """

    key: str
    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def header(self) -> bytes:
        """Header: JSON with the values and the name, dtype and shape of each tensor."""
        return json.dumps({"values": self.values, "tensors": layout_of(self.tensors)}).encode()


class Server:
    """Server that sends one rank's state to other replicas, in its own threads.

    Args:
        address: numeric address on which the server listens, at a free port.
        token: secret of the job.
        timeout: seconds that a send may take without progress, and that a client may wait for an offer.
    """

    def __init__(self, address: str, token: bytes, timeout: float) -> None:
        self._token = token
        self._timeout = timeout
        self._socket = socket.create_server((address, 0))
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._refused: set[str] = set()  # keys of attempts that have failed here
        self._sending: set[socket.socket] = set()
        self._places = threading.Semaphore(_CONNECTIONS)
        threading.Thread(target=self._accept, name="d9d-torchft-server", daemon=True).start()

    def offer(self, offer: Offer) -> None:
        """Send this state to clients from now on. Its tensors must not change before :meth:`withdraw` has returned."""
        with self._changed:
            self._offer = offer
            self._changed.notify_all()

    def refuse(self, key: str) -> None:
        """Close connections of clients that wait for an offer with this key: the attempt has failed on this rank."""
        with self._changed:
            self._refused.add(key)
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Send the state no longer; end the sends that still run, and wait for their end."""
        with self._changed:
            self._offer = None
            for connection in self._sending:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._sending)

    def close(self) -> None:
        """Stop listening."""
        self.withdraw()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="d9d-torchft-send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # An unknown client may send anything; an error ends only its own connection.
            with connection, suppress(OSError, TransportError):
                connection.settimeout(_SECONDS)
                _greet_client(connection, self._token)
                request = _received_json(connection, _REQUEST)
                connection.settimeout(self._timeout)
                if request.get("want") == "state":
                    self._send(connection, request.get("key"))
                else:
                    _send_block(connection, b"{}")
        finally:
            self._places.release()

    def _send(self, connection: socket.socket, key: object) -> None:
        with self._changed:
            # Wait, because the client may ask before this replica offers its state in the same attempt.
            self._changed.wait_for(
                lambda: key in self._refused or (self._offer is not None and self._offer.key == key), self._timeout
            )
            offer = self._offer
            if offer is None or offer.key != key:
                return
            self._sending.add(connection)
        try:
            _send_block(connection, offer.header())
            for tensor in offer.tensors.values():
                connection.sendall(_bytes_of(tensor.detach().cpu()))
        finally:
            with self._changed:
                self._sending.discard(connection)
                self._changed.notify_all()


def is_there(address: str, token: bytes) -> bool:
    """Whether an authentic server answers at ``host:port``.

    Raises:
        TransportError: a server answers, but it has another token or is no server of this version.
    """
    try:
        with _connected(address, token) as connection:
            _send_block(connection, b'{"want": "nothing"}')
            _received_json(connection, _REQUEST)
    except OSError:
        return False
    return True


def fetch(
    address: str, token: bytes, key: str, like: Mapping[str, Tensor], timeout: float
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fetch the state that a server offers.

    Args:
        address: ``host:port`` of the server.
        token: secret of the job.
        key: key of the attempt.
        like: name -> tensor with the expected shape and dtype.
        timeout: seconds without progress after which the transfer fails.

    Returns:
        JSON values, and tensors in host memory.

    Raises:
        OSError: the connection failed.
        TransportError: the server is not authentic, is of another version, or its state has another layout.
    """
    with _connected(address, token) as connection:
        connection.settimeout(timeout)
        _send_block(connection, json.dumps({"want": "state", "key": key}).encode())
        header = _received_json(connection, _HEADER)
        _check_layout(header.get("tensors"), layout_of(like))
        values = header.get("values")
        if not isinstance(values, dict):
            raise TransportError("the header has no values; use the same version of d9d-torchft in all replicas")
        tensors = {}
        for name, tensor in like.items():
            tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            _receive_into(connection, _bytes_of(tensors[name]))
    return values, tensors


def layout_of(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """Name, dtype and shape of each tensor, as JSON."""
    return [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]


def _check_layout(there: object, here: Sequence[Sequence[Any]]) -> None:
    """Compare the layout of another replica's state with this replica's.

    Raises:
        TransportError: the layouts differ; the text has the first difference.
    """
    if there == here:
        return
    listed = there if isinstance(there, list) else []
    pairs = [(a, b) for a, b in zip(listed, here, strict=False) if a != b]
    first = f"{pairs[0][0]} there, {pairs[0][1]} here" if pairs else f"{len(listed)} tensors there, {len(here)} here"
    raise TransportError(f"its state has another layout: {first}; use the same job and versions in all replicas")


@contextmanager
def _connected(address: str, token: bytes) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_SECONDS) as connection:
        theirs = _received(connection, _NONCE)
        own = secrets.token_bytes(_NONCE)
        connection.sendall(own + _mac(token, b"client", theirs, own))
        proof = _received(connection, _MAC)
        if not hmac.compare_digest(proof, _mac(token, b"server", theirs, own)):
            raise TransportError("it has another token; all replicas of a job need the same one")
        yield connection


def _greet_client(connection: socket.socket, token: bytes) -> None:
    own = secrets.token_bytes(_NONCE)
    connection.sendall(own)
    theirs, proof = _received(connection, _NONCE), _received(connection, _MAC)
    if not hmac.compare_digest(proof, _mac(token, b"client", own, theirs)):
        connection.sendall(bytes(_MAC))  # so that the client can tell a wrong token from a lost replica
        raise TransportError("the client has another token")
    connection.sendall(_mac(token, b"server", own, theirs))


def _mac(token: bytes, label: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(token, _PROTOCOL + label + server + client, hashlib.sha256)


def _send_block(connection: socket.socket, block: bytes) -> None:
    connection.sendall(struct.pack("!Q", len(block)) + block)


def _received_json(connection: socket.socket, most: int) -> dict[str, Any]:
    (size,) = struct.unpack("!Q", _received(connection, 8))
    if size > most:
        raise TransportError(f"a block of {size} bytes is longer than {most}")
    try:
        found = json.loads(_received(connection, size))
    except ValueError as error:
        raise TransportError(f"a block is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise TransportError("a block is no JSON object")
    return found


def _received(connection: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    _receive_into(connection, memoryview(found))
    return bytes(found)


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = connection.recv_into(target[done:])
        if not count:
            raise ConnectionError("the other replica closed the connection")
        done += count


def _bytes_of(tensor: Tensor) -> memoryview:
    """Bytes of a contiguous tensor in host memory, not copied."""
    if not math.prod(tensor.shape):
        return memoryview(b"")
    numbers: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
