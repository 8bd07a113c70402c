"""Processes of a job, as ``/proc`` shows them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest
from d9d_testing.processes import LOOPBACK, children_of, descendants_of, is_running, listening_at, ranks_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
SHELL, SLEEP = shutil.which("sh"), shutil.which("sleep")


def test_ranks_are_children_with_a_rank_and_a_dead_process_is_not_running() -> None:
    with_rank = subprocess.Popen([SLEEP or "sleep", "60"], env={"A": "1", "RANK": "13", "B": "2"})
    without = subprocess.Popen([SLEEP or "sleep", "60"], env={"A": "1", "LOCAL_RANK": "5", "B": "2"})
    try:
        assert {with_rank.pid, without.pid} <= set(children_of(os.getpid()))
        assert {pid for rank, pid in ranks_of(os.getpid()).items() if rank in (13, 5)} == {with_rank.pid}
        assert ranks_of(os.getpid())[13] == with_rank.pid
        assert is_running(with_rank.pid)
        without.kill()
        os.waitid(os.P_PID, without.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is waited for
        assert not is_running(without.pid)
        without.wait()
        assert not is_running(without.pid)
    finally:
        for process in (with_rank, without):
            process.kill()
            process.wait()


def test_descendants_are_children_and_their_children() -> None:
    script = f"{SLEEP} 60 & echo ready; wait"
    with subprocess.Popen([SHELL or "sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        below = descendants_of(shell.pid)
        assert below == children_of(shell.pid)
        assert len(below) == 1
        assert descendants_of(os.getpid()).count(below[0]) == 1
        for pid in (*below, shell.pid):
            os.kill(pid, 9)


def test_only_sockets_that_accept_connections_listen() -> None:
    before = len(listening_at(os.getpid()))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        found = listening_at(os.getpid())
        with subprocess.Popen([SLEEP or "sleep", "60"]) as other:
            assert listening_at(other.pid) == []  # the socket is not its own
            other.kill()
    assert len(found) == before + 1
    assert set(found) & LOOPBACK
    assert len(listening_at(os.getpid())) == before
