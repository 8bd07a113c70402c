"""Settings of a replica come from the environment, with one line for each mistake."""

from __future__ import annotations

import fcntl
import socket
import sys
from pathlib import Path

import pytest
from d9d_core.errors import JobError
from d9d_torchft.config import TorchFTConfig
from d9d_torchft.settings import Settings, address_of


def test_settings_are_read_and_the_token_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of enough bytes\n")
    environ = {
        "D9D_TORCHFT_LIGHTHOUSE": "http://10.0.0.1:29510",
        "D9D_TORCHFT_REPLICA": "rack-1.a",
        "D9D_TORCHFT_TOKEN_FILE": str(tmp_path / "token"),
    }
    found = Settings.of(environ)
    assert (found.lighthouse, found.replica) == ("http://10.0.0.1:29510", "rack-1.a")
    assert found.token == b"a secret of enough bytes"
    assert "secret" not in repr(found)


def test_missing_and_wrong_settings_are_all_reported(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    with pytest.raises(JobError) as caught:
        Settings.of({"D9D_TORCHFT_LIGHTHOUSE": "10.0.0.1", "D9D_TORCHFT_TOKEN_FILE": str(tmp_path / "token")})
    lines = str(caught.value).splitlines()
    assert "d9d torchft run" in lines[0]
    assert [line.split()[0].rstrip(":") for line in lines[1:]] == [
        "D9D_TORCHFT_LIGHTHOUSE", "D9D_TORCHFT_REPLICA", "D9D_TORCHFT_TOKEN_FILE",
    ]  # fmt: skip
    assert "has 5 bytes; write at least 16" in lines[3]
    with pytest.raises(JobError, match="D9D_TORCHFT_TOKEN_FILE is not set; name a file with a secret"):
        Settings.of({})


def test_a_token_is_a_readable_file_of_16_bytes_at_least(tmp_path: Path) -> None:
    token = tmp_path / "token"
    environ = {"D9D_TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1", "D9D_TORCHFT_REPLICA": "a"}
    environ["D9D_TORCHFT_TOKEN_FILE"] = str(token)
    with pytest.raises(JobError) as caught:
        Settings.of(environ)
    assert str(caught.value).splitlines()[1:] == [
        f"D9D_TORCHFT_TOKEN_FILE: '{token}' cannot be read (No such file or directory); name a file with a secret"
    ]
    token.write_text("x" * 15 + "\n")
    with pytest.raises(JobError, match="the token has 15 bytes; write at least 16"):
        Settings.of(environ)
    token.write_text("x" * 16)
    assert Settings.of(environ).token == b"x" * 16


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are resolved on Linux only")
def test_an_interface_becomes_its_address() -> None:
    assert address_of(None) == address_of(TorchFTConfig(name="torchft", interface="lo").interface) == "127.0.0.1"
    with pytest.raises(JobError, match=r"interface 'nothing0' has no IPv4 address .*; name one of .*lo"):
        address_of("nothing0")


def test_a_missing_token_file_is_not_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unset").write_text("a secret of another job")
    with pytest.raises(JobError, match="D9D_TORCHFT_TOKEN_FILE is not set"):
        Settings.of({"D9D_TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1", "D9D_TORCHFT_REPLICA": "a"})


def test_the_address_of_an_interface_is_asked_from_an_ipv4_socket_and_on_linux_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(descriptor: int, request: int, block: bytes) -> bytes:
        probe = socket.socket(fileno=descriptor)
        assert (probe.family, probe.type) == (socket.AF_INET, socket.SOCK_DGRAM)
        probe.detach()
        assert (request, block.rstrip(b"\0"), len(block)) == (0x8915, b"eth0", 256)
        return b"eth0".ljust(20, b"\0") + bytes([10, 1, 2, 3]) + bytes(232)

    monkeypatch.setattr(fcntl, "ioctl", answer)
    monkeypatch.setattr(sys, "platform", "linux")
    assert address_of("eth0") == "10.1.2.3"
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(JobError, match="interface 'eth0' can be resolved on Linux only; remove the field"):
        address_of("eth0")
