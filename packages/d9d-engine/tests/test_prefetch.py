from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from d9d_core.errors import DataError
from d9d_core.types import Pack, State
from d9d_engine.run.prefetch import DevicePrefetcher

CPU = torch.device("cpu")


class Counting:
    """Pack n holds the number n; the state, one object that it changes in place, is the next n."""

    def __init__(self, fails_at: int = -1) -> None:
        self._position = {"next": 0}
        self.fails_at = fails_at
        self.taken_by: list[str] = []
        self.facts: State = {}

    def next_pack(self) -> Pack:
        number = self._position["next"]
        self.taken_by.append(threading.current_thread().name)
        if number == self.fails_at:
            raise DataError(f"pack {number} is missing")
        self._position["next"] += 1
        return [{"tokens": torch.tensor([number])}, {"tokens": torch.tensor([-number])}]

    def state(self) -> State:
        return self._position

    def load_state(self, state: Any) -> None:
        self._position["next"] = state["next"]

    def save_assets(self, directory: Any) -> None:
        raise AssertionError


def numbers(prefetcher: DevicePrefetcher, count: int) -> list[int]:
    packs = [prefetcher.next() for _ in range(count)]
    assert all(len(pack) == 2 and pack[1]["tokens"].item() == -pack[0]["tokens"].item() for pack in packs)
    return [int(pack[0]["tokens"]) for pack in packs]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_part_is_taken_of_every_microbatch_that_is_copied(prefetch: int) -> None:
    part = {"tokens": torch.tensor([7])}
    seen = []
    with DevicePrefetcher(Counting(), CPU, prefetch, split=lambda whole: seen.append(whole) or part) as prefetcher:
        assert prefetcher.next() == [part, part]
    assert seen[:2] == Counting().next_pack()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_packs_and_states_are_the_same_with_any_prefetch(prefetch: int) -> None:
    with DevicePrefetcher(Counting(), CPU, prefetch) as prefetcher:
        assert prefetcher.state() == {"next": 0}
        for number in range(8):
            assert numbers(prefetcher, 1) == [number]
            assert prefetcher.state() == {"next": number + 1}
        prefetcher.load_state({"next": 3})
        assert prefetcher.state() == {"next": 3}
        assert numbers(prefetcher, 3) == [3, 4, 5]
        prefetcher.load_state(dict(prefetcher.state()))
        assert numbers(prefetcher, 1) == [6]


def test_at_most_prefetch_packs_are_taken_ahead() -> None:
    stream = Counting()
    with DevicePrefetcher(stream, CPU, 3) as prefetcher:
        assert stream.taken_by == []  # nothing before the first pack is asked for
        for handed_out in (1, 2):
            prefetcher.next()
            until(lambda wanted=handed_out + 3: len(stream.taken_by) >= wanted)
            time.sleep(0.02)
            assert len(stream.taken_by) == handed_out + 3
        assert prefetcher.state() == {"next": 2}
        assert stream.state() == {"next": 5}
    assert set(stream.taken_by) == {"d9d-prefetch"}


def test_without_prefetch_there_is_no_thread() -> None:
    stream = Counting()
    with DevicePrefetcher(stream, CPU, 0) as prefetcher:
        prefetcher.next()
    assert stream.taken_by == [threading.current_thread().name]


def test_errors_come_in_their_turn_with_the_traceback_of_the_thread() -> None:
    with DevicePrefetcher(Counting(fails_at=2), CPU) as prefetcher:
        assert numbers(prefetcher, 2) == [0, 1]
        for _ in range(2):
            with pytest.raises(DataError, match="pack 2 is missing") as caught:
                prefetcher.next()
            assert "next_pack" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert prefetcher.state() == {"next": 2}  # the last good place can still be saved
        prefetcher.load_state({"next": 3})
        assert numbers(prefetcher, 2) == [3, 4]


def test_closing_ends_the_thread_and_keeps_the_state() -> None:
    prefetcher = DevicePrefetcher(Counting(), CPU, 2)
    prefetcher.next()
    prefetcher.close()
    prefetcher.close()
    assert prefetcher.state() == {"next": 1}
    with pytest.raises(RuntimeError, match="this prefetcher is closed"):
        prefetcher.next()


def test_closing_waits_for_the_pack_that_is_being_prepared() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Counting):
        def next_pack(self) -> Pack:
            if self._position["next"] == 1:
                entered.set()
                assert go_on.wait(5)
            return super().next_pack()

    stream = Slow()
    with closing(DevicePrefetcher(stream, CPU, 1)) as prefetcher:
        prefetcher.next()
        assert entered.wait(5)
        threading.Timer(0.02, go_on.set).start()
    assert stream.state() == {"next": 2}


def test_negative_prefetch_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch is -1"):
        DevicePrefetcher(Counting(), CPU, -1)


gpu = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch's own: its debug mode is a prototype
]
MILLISECONDS = 2_000_000  # cycles of the device, about


class Large(Counting):
    """Packs from number 1 on; their copies start late if ``beside`` is the prefetcher's stream."""

    beside: torch.Stream | None = None

    def __init__(self) -> None:
        super().__init__()
        self.load_state({"next": 1})

    def next_pack(self) -> Pack:
        if self.beside is not None:
            with self.beside:
                torch.cuda._sleep(20 * MILLISECONDS)
        first, _ = super().next_pack()
        return [{"tokens": first["tokens"].expand(1 << 20).contiguous()} for _ in range(3)]


def extremes(pack: Pack) -> torch.Tensor:
    return torch.stack([torch.stack([mb["tokens"].min(), mb["tokens"].max()]) for mb in pack])


class TestOnAccelerator:
    pytestmark = [*gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_packs_are_read_after_they_were_copied(self, prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
        pinned: list[torch.Tensor] = []
        pin = torch.Tensor.pin_memory
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or pin(tensor))
        stream = Large()
        with DevicePrefetcher(stream, torch.device("cuda"), prefetch) as prefetcher:
            stream.beside = prefetcher._transfer._beside
            for number in range(1, 6):
                assert extremes(prefetcher.next()).tolist() == [[number, number]] * 3
        assert len(pinned) >= 3 * 5

    def test_packs_that_were_dropped_are_not_overwritten_before_they_are_read(self) -> None:
        with DevicePrefetcher(Large(), torch.device("cuda"), 2) as prefetcher:
            prefetcher.next()
            torch.cuda.synchronize()
            seen = []
            for _ in range(8):
                torch.cuda._sleep(50 * MILLISECONDS)
                behind = torch.cuda.Event()
                behind.record()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    seen.append(extremes(prefetcher.next()))  # the pack is dropped here
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert not behind.query()  # no thread waited for the device
            assert torch.stack(seen).tolist() == [[[number, number]] * 3 for number in range(2, 10)]

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_packs_go_to_the_device_that_was_current_when_the_feed_was_made(self) -> None:
        stream = Large()
        with torch.cuda.device(1):
            prefetcher = DevicePrefetcher(stream, torch.device("cuda"))
        stream.beside = prefetcher._transfer._beside
        with prefetcher:
            for number in range(1, 6):
                pack = prefetcher.next()
                assert pack[0]["tokens"].device == torch.device("cuda", 1)
                assert extremes(pack).tolist() == [[number, number]] * 3
