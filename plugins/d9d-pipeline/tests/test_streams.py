"""Order of work on the streams of stages, over a stand-in of CUDA, and how neighbours open their connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_pipeline.overlap import streams as module
from d9d_pipeline.overlap.streams import StageStreams
from d9d_pipeline.runtime import transfers
from d9d_pipeline.runtime.transfers import Transfers


class Stream:
    """Stand-in of a stream that notes the streams it waits for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self.said.append(f"{self.name} waits for an event of {event.of}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    made = iter("abc")

    class Event:
        of = "nothing"

        def record(self, stream: Stream) -> None:
            self.of = stream.name

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        noted.append(f"on {stream.name}")
        yield
        noted.append("off")

    cuda = SimpleNamespace(
        Stream=lambda _device: Stream(next(made), noted), Event=Event, stream=on,
        current_stream=lambda _device: Stream("current", noted),
    )  # fmt: skip
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
    return noted


def tensor(said: list[str]) -> Any:
    return SimpleNamespace(record_stream=lambda stream: said.append(f"{stream.name} reads"))


def test_stages_wait_for_the_work_before_a_step_and_the_work_after_it_for_them(said: list[str]) -> None:
    streams = StageStreams(torch.device("cuda"), [3, 5])
    streams.join()  # before a step: nothing to wait for
    assert said == []
    streams.fork()
    with streams.on(5):
        said.append("work")
    streams.join()
    assert said == [
        "a waits for current", "b waits for current", "on b", "work", "off", "current waits for a",
        "current waits for b",
    ]  # fmt: skip


def test_a_stage_reads_tensors_of_another_after_they_are_made(said: list[str]) -> None:
    streams = StageStreams(torch.device("cuda"), [3, 5])
    streams.handoff([tensor(said)], None, 3)  # no step has begun
    streams.handoff([tensor(said)], 3, 3)
    streams.handoff([tensor(said)], 3, 9)  # a stage of another rank
    assert said == []
    assert streams.mark(9) is None
    streams.handoff([tensor(said), tensor(said)], 3, 5, streams.mark(3))
    assert said == ["b waits for an event of a", "b reads", "b reads"]
    said.clear()
    streams.handoff([tensor(said)], 5, 3)
    assert said == ["a waits for b", "a reads"]
    streams.fork()
    said.clear()
    streams.handoff([tensor(said)], None, 3)
    assert said == ["a waits for current", "a reads"]


def test_without_a_gpu_streams_do_nothing(said: list[str]) -> None:
    streams = StageStreams(torch.device("cpu"), [3, 5])
    streams.fork()
    with streams.on(3):
        said.append("work")
    streams.join()
    assert streams.mark(3) is None
    streams.handoff([tensor(said)], 3, 5)
    assert said == ["work"]


def opened(place: int, hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Connections that a rank opens on a GPU: the call, the group, and its neighbour."""
    calls: list[tuple[str, str, int]] = []
    stand_in = SimpleNamespace(
        send=lambda _token, group, group_dst: calls.append(("send", group, group_dst)),
        recv=lambda _token, group, group_src: calls.append(("receive", group, group_src)),
    )
    monkeypatch.setattr(transfers, "dist", stand_in)
    topology = SimpleNamespace(
        coordinate={"pp": place}, device=torch.device("meta"), axes_group=lambda _axis, purpose, blocks: purpose
    )
    Transfers(SimpleNamespace(topology=topology, pipeline=SimpleNamespace(hosts=hosts)))  # type: ignore[arg-type]
    return calls


def test_neighbours_open_their_connections_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = "pipeline up", "pipeline down"
    assert opened(0, [0, 1, 2], monkeypatch) == [("send", up, 1), ("receive", down, 1)]
    assert opened(1, [0, 1, 2], monkeypatch) == [
        ("receive", up, 0), ("send", down, 0), ("send", up, 2), ("receive", down, 2),
    ]  # fmt: skip
    # Two adjacent stages on one rank need no connection; a loop from the last rank to the first does.
    assert opened(0, [0, 1, 1, 0], monkeypatch) == [("send", up, 1), ("receive", down, 1)]
