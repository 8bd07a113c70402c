"""The transport sends a state bit for bit to holders of the token, and nothing to others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from d9d_torchft import transport
from d9d_torchft.transport import Offer, Server, TransportError, fetch, is_there
from torch import Tensor

TOKEN = b"0123456789abcdef"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("127.0.0.1", TOKEN, 5.0)
    yield made
    made.close()


def state() -> dict[str, Tensor]:
    return {
        "weights": torch.randn(300, 70),
        "step": torch.tensor(7, dtype=torch.int64),
        "half": torch.randn(5).to(torch.bfloat16),
        "none": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "columns": torch.randn(4, 6).t(),
    }


def like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def test_a_state_arrives_bit_for_bit_also_if_the_client_comes_first(server: Server) -> None:
    sent = state()
    server.offer(Offer("an earlier key", {}, sent))
    timer = threading.Timer(0.2, lambda: server.offer(Offer("key", {"step": 7, "names": ["a"]}, sent)))
    timer.start()
    values, found = fetch(server.address, TOKEN, "key", like(sent), 5.0)
    assert values == {"step": 7, "names": ["a"]}
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_another_token_gets_nothing_and_is_reported(server: Server) -> None:
    server.offer(Offer("key", {}, state()))
    assert is_there(server.address, TOKEN)
    for call in (
        lambda: is_there(server.address, b"another token.."),
        lambda: fetch(server.address, b"another token..", "key", state(), 5.0),
    ):
        with pytest.raises(TransportError, match="it has another token; all replicas of a job need the same one"):
            call()


def test_a_stranger_gets_a_nonce_and_zeros_only(server: Server) -> None:
    host, _, port = server.address.rpartition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(bytes(64))
        while part := connection.recv(4096):
            received += part
    assert len(received) == 64
    assert received[32:] == bytes(32)


def test_a_server_without_the_token_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(64)
                connection.sendall(b"x" * 32)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(TransportError, match="it has another token"):
            is_there(f"127.0.0.1:{listening.getsockname()[1]}", TOKEN)
        thread.join()


def test_a_replica_that_is_gone_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert not is_there(address, TOKEN)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weights": torch.zeros(2, 2)}, r"\['weights', 'torch.float32', \[300, 70\]\] there, .*\[2, 2\]\] here"),
        ({"step": torch.tensor(0.0)}, r"'step', 'torch.int64', .* there, .*'torch.float32'"),
        ({"more": torch.zeros(1)}, "6 tensors there, 7 here; use the same job"),
    ],
    ids=["shape", "dtype", "names"],
)
def test_another_layout_is_refused(server: Server, change: dict[str, Tensor], text: str) -> None:
    server.offer(Offer("key", {}, state()))
    with pytest.raises(TransportError, match=text):
        fetch(server.address, TOKEN, "key", {**state(), **change}, 5.0)


def test_lengths_of_blocks_are_limited(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.offer(Offer("key", {"text": "x" * 5000}, {}))
    monkeypatch.setattr(transport, "_HEADER", 1000)
    with pytest.raises(TransportError, match="is longer than 1000"):
        fetch(server.address, TOKEN, "key", {}, 5.0)


@pytest.mark.parametrize("end", [Server.withdraw, Server.close])
def test_nothing_is_sent_after_a_withdrawal(end: Callable[[Server], None]) -> None:
    server = Server("127.0.0.1", TOKEN, 0.5)
    # More than the buffers of sockets hold, to a client that does not read on: the send is under way.
    sent = {"large": torch.zeros(2**25)}
    server.offer(Offer("key", {}, sent))
    with transport._connected(server.address, TOKEN) as connection:
        transport._send_block(connection, b'{"want": "state", "key": "key"}')
        connection.recv(8)
        deadline = time.monotonic() + 5
        while not server._sending and time.monotonic() < deadline:
            time.sleep(0.01)
        end(server)
        assert not server._sending
    with pytest.raises(OSError, match="closed the connection" if end is Server.withdraw else "refused"):
        fetch(server.address, TOKEN, "other", sent, 5.0)
    server.close()


def test_a_client_waits_no_longer_once_the_attempt_has_failed(server: Server) -> None:
    timer = threading.Timer(0.2, lambda: server.refuse("key"))
    timer.start()
    started = time.monotonic()
    with pytest.raises(OSError, match="closed the connection"):
        fetch(server.address, TOKEN, "key", {}, 5.0)
    assert time.monotonic() - started < 4  # the server's own limit is 5 s
    timer.join()


def test_a_client_waits_for_an_offer_of_its_attempt_no_longer_than_the_timeout() -> None:
    server = Server("127.0.0.1", TOKEN, 0.1)
    server.offer(Offer("other", {}, {}))
    with pytest.raises(OSError, match="closed the connection"):
        fetch(server.address, TOKEN, "key", {}, 5.0)
    server.close()
    assert not is_there(server.address, TOKEN)


@pytest.mark.parametrize(("block", "text"), [(b"[1]", "is no JSON object"), (b"{", "is not JSON"), (b"1", "no JSON")])
def test_a_block_is_one_json_object(block: bytes, text: str) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(len(block).to_bytes(8, "big") + block)
        with pytest.raises(TransportError, match=text):
            transport._received_json(there, 100)


def test_a_block_may_be_as_long_as_the_limit() -> None:
    here, there = socket.socketpair()
    with here, there:
        transport._send_block(here, b'{"a": 1}')
        assert transport._received_json(there, 8) == {"a": 1}
        transport._send_block(here, b'{"a": 1}')
        with pytest.raises(TransportError, match="a block of 8 bytes is longer than 7"):
            transport._received_json(there, 7)


@pytest.mark.parametrize(("size", "answers"), [(4096, True), (4097, False)])
def test_a_request_has_4_kib_at_most(server: Server, size: int, answers: bool) -> None:
    request = b'{"want": "nothing", "more": "'
    with transport._connected(server.address, TOKEN) as connection:
        transport._send_block(connection, request + b"x" * (size - len(request) - 2) + b'"}')
        if answers:
            assert transport._received_json(connection, 2) == {}
        else:
            with pytest.raises(OSError, match="closed|reset"):
                transport._received_json(connection, 2)


def test_a_server_that_does_not_answer_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            connection, _ = listening.accept()
            with connection:
                transport._greet_client(connection, TOKEN)

        thread = threading.Thread(target=greet)
        thread.start()
        assert not is_there(f"127.0.0.1:{listening.getsockname()[1]}", TOKEN)
        thread.join()
