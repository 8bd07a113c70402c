"""Order of work on the streams of stages, over a stand-in of CUDA, and how neighbours open their connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.program.runner import StepState
from d9d_core.types import TensorSpec
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


def test_receives_are_posted_once_and_in_the_order_of_sending() -> None:
    posted: list[str] = []

    def receive(name: str) -> Any:
        def start(tensor: torch.Tensor) -> Any:
            posted.append(f"{name} {list(tensor.shape)}")
            return SimpleNamespace(wait=lambda: posted.append(f"wait for {name}")) if name != "c" else None

        specs = {"x": TensorSpec((2, 3), torch.float32), "n": TensorSpec((1,), torch.int64)}
        return transfers._PendingReceive(specs, start, torch.device("cpu"))

    a, b, c = (receive(name) for name in "abc")
    waiting = deque([a, b, c])
    transfers._post(waiting, b)
    assert posted == ["a [2, 3]", "a [1]", "b [2, 3]", "b [1]"]
    assert list(waiting) == [c]
    found = transfers._arrived(waiting, a)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        "x": ((2, 3), torch.float32), "n": ((1,), torch.int64),
    }  # fmt: skip
    assert posted[4:] == ["wait for a"] * 2
    assert list(transfers._arrived(waiting, c)) == ["x", "n"]
    assert posted[6:] == ["c [2, 3]", "c [1]"]


def test_a_send_keeps_its_tensors_until_they_have_left_or_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[float, str, int]] = []
    works: list[Any] = []
    waited: list[int] = []

    def isend(tensor: torch.Tensor, group: str, group_dst: int) -> Any:
        sent.append((tensor.sum().item(), group, group_dst))
        number = len(works)
        works.append(SimpleNamespace(left=False, wait=lambda: waited.append(number)))
        works[-1].is_completed = lambda work=works[-1]: work.left
        return works[-1]

    monkeypatch.setattr(transfers, "dist", SimpleNamespace(isend=isend))
    topology = SimpleNamespace(
        coordinate={"pp": 1}, device=torch.device("cpu"), axes_group=lambda _axis, purpose, blocks: (purpose, blocks)
    )
    runner: Any = SimpleNamespace(topology=topology, pipeline=SimpleNamespace(hosts=[0, 1, 2]))
    made, state = Transfers(runner), StepState(0, [], {})
    up, down = ("pipeline up", 8), ("pipeline down", 8)
    made._send([torch.full((2, 2), 2.0).t(), torch.ones(1)], 2, state)
    made._send([torch.full((1,), 3.0)], 0, state)
    assert sent == [(8.0, up, 2), (1.0, up, 2), (3.0, down, 0)]
    assert [work for work, _ in made._leaving] == works
    works[0].left = works[2].left = True
    made._send([torch.zeros(1)], 2, state)
    assert [work for work, _ in made._leaving] == [works[1], works[3]]
    assert len(state.ends) == 1
    state.ends[0]()
    assert (waited, made._leaving) == ([1, 3], [])


def test_a_pipeline_needs_process_groups() -> None:
    class Alone:
        coordinate: ClassVar = {"pp": 0}

        def axes_group(self, *_: Any, **__: Any) -> None:
            return None

        def __str__(self) -> str:
            return "pp=1"

    with pytest.raises(BuildError, match="^pp=1 has no process group, which a pipeline needs; start the job with d9d"):
        Transfers(SimpleNamespace(topology=Alone()))  # type: ignore[arg-type]
