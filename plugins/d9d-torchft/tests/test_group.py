"""A group of replicas is not waited for if a member has died, and its sums are exact for all dtypes."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_torchft import group
from d9d_torchft.group import ReplicaGroup
from torch import distributed as dist


def store() -> tuple[object, str]:
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return made, f"127.0.0.1:{made.port}"


def test_a_member_that_dies_before_it_connects_is_noticed_by_asking_it() -> None:
    _kept, address = store()
    asked: list[int] = []

    def lives(index: int) -> bool:
        asked.append(index)
        return index != 2

    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"members \[1, 2\] of the group did not come"):
        ReplicaGroup(address, "key", 0, 3, "127.0.0.1", 30.0, torch.device("cpu"), lives)
    assert time.monotonic() - started < 10
    assert asked == [1, 2]


def test_a_store_that_has_died_is_noticed_by_asking_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_STORE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    asked: list[int] = []
    with pytest.raises(RuntimeError) as caught:
        ReplicaGroup(address, "key", 1, 2, "127.0.0.1", 30.0, torch.device("cpu"), lambda one: bool(asked.append(one)))
    assert asked == [0]
    assert "did not come" not in str(caught.value)  # no other store takes its place


class Clock:
    """Stand-in of the module ``time``: time passes in sleeps, and a little with each look at the clock."""

    def __init__(self, look: float = 0.0) -> None:
        self.now = 0.0
        self._look = look

    def monotonic(self) -> float:
        self.now += self._look
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_members_that_live_are_waited_for_15_seconds_and_asked_every_300_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    _kept, address = store()
    clock, times = Clock(), []
    monkeypatch.setattr(group, "time", clock)

    def lives(_index: int) -> bool:
        times.append(clock.now)
        return True

    with pytest.raises(RuntimeError, match=r"members \[0\] of the group did not come"):
        ReplicaGroup(address, "key", 1, 2, "127.0.0.1", 30.0, torch.device("cpu"), lives)
    assert clock.now == pytest.approx(15, abs=0.31)
    assert times == pytest.approx([0.3 * (look + 1) for look in range(len(times))], abs=0.01)
    assert len(times) in (49, 50)


def test_a_store_whose_owner_lives_is_tried_for_15_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_STORE", 0.1)
    monkeypatch.setattr(group, "time", Clock(look=6.0))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    asked: list[int] = []

    def lives(index: int) -> bool:
        asked.append(index)
        return True

    with pytest.raises(RuntimeError):
        ReplicaGroup(address, "key", 1, 2, "127.0.0.1", 30.0, torch.device("cpu"), lives)
    assert asked == [0, 0]


def test_sums_keep_dtypes_shapes_and_order_and_a_lost_member_ends_them() -> None:
    _kept, address = store()

    def member(index: int) -> list[torch.Tensor]:
        made = ReplicaGroup(address, "key", index, 2, "127.0.0.1", 30.0, torch.device("cpu"), lambda _index: True)
        tensors = [
            torch.full((2, 3), index + 1.0),
            torch.tensor(index + 1, dtype=torch.int64),
            torch.full((3, 2), index + 1.0).t(),
            torch.full((4,), index + 1.0, dtype=torch.bfloat16),
            torch.full((1,), index + 1.0, dtype=torch.float64),
        ]
        made.reduce(tensors, "sum")
        least = torch.tensor([index + 1.0])
        made.reduce([least], "min")
        assert made.all(True)
        assert not made.all(index == 0)
        assert not made.launched
        assert made.landed()
        if index == 0:
            made.abort()
        else:
            with pytest.raises(RuntimeError):
                made.reduce([torch.ones(3)], "sum")
        return [*tensors, least]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(member, range(2)):
            assert [tensor.dtype for tensor in found[:5]] == [
                torch.float32, torch.int64, torch.float32, torch.bfloat16, torch.float64,
            ]  # fmt: skip
            assert all((tensor == 3).all() for tensor in found[:5])
            assert found[5].item() == 1.0


class Backend:
    """Stand-in of a process group: doubles the tensors that it reduces."""

    def __init__(self) -> None:
        self.devices: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor], _options: object) -> SimpleNamespace:
        self.devices.append(tensors[0].device.type)
        tensors[0].mul_(2)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("with_nccl", [True, False])
def test_tensors_on_the_cpu_are_summed_by_gloo_and_others_by_nccl_if_it_is_there(with_nccl: bool) -> None:
    made = ReplicaGroup.__new__(ReplicaGroup)
    gloo, nccl = Backend(), Backend() if with_nccl else None
    vars(made).update(_gloo=gloo, _nccl=nccl, _works=[])
    value = torch.tensor([3.0])
    made.reduce([value, torch.empty(2, device="meta")], "sum")
    assert value.item() == 6
    assert gloo.devices == (["cpu"] if nccl else ["cpu", "meta"])
    assert nccl is None or nccl.devices == ["meta"]
    assert len(made._works) == int(with_nccl)


class Work:
    """Stand-in of an operation on a GPU, which is complete after some looks."""

    def __init__(self, looks: float, success: bool = True) -> None:
        self._looks, self._success = looks, success

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def is_success(self) -> bool:
        return self._success


class LostWork(Work):
    """Operation whose member is lost."""

    def is_completed(self) -> bool:
        raise RuntimeError("connection reset")


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([Work(0), Work(3)], True),
        ([Work(0), Work(2, success=False)], False),
        ([Work(0), LostWork(0)], False),
        ([Work(float("inf"))], False),
        ([Work(1000)], True),
        ([Work(3000)], False),
    ],
    ids=["late", "failed", "lost", "never", "in-time", "too-late"],
)
def test_results_on_a_gpu_have_landed_if_all_operations_succeed_in_time(
    works: list[Work], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "time", Clock())
    made, left = ReplicaGroup.__new__(ReplicaGroup), iter(works)
    nccl = SimpleNamespace(allreduce=lambda _tensors, _options: next(left))
    vars(made).update(_gloo=None, _nccl=nccl, _works=[], _timeout=1.0)  # the looks are 0.5 ms apart
    for _ in works:
        made.reduce([torch.empty(2, device="meta")], "sum")
    assert made.launched
    assert made.landed() is expected
    assert not made.launched
    assert made.landed()


def test_tensors_of_a_kind_share_reductions_of_64_mib() -> None:
    made, sizes = ReplicaGroup.__new__(ReplicaGroup), []

    def allreduce(tensors: list[torch.Tensor], _options: object) -> SimpleNamespace:
        sizes.append((tensors[0].dtype, *tensors[0].shape))
        return SimpleNamespace(wait=lambda: None)

    vars(made).update(_gloo=SimpleNamespace(allreduce=allreduce), _nccl=None, _works=[])
    numbers = [2**24 - 4, 0, 3, 1, 1, 2**25, 2, 2]
    tensors = [torch.empty(size, device="meta") for size in numbers]
    tensors[3:3] = [torch.empty(5, device="meta", dtype=torch.int64), torch.empty(0, device="meta", dtype=torch.bool)]
    made.reduce(tensors, "sum")
    assert sizes == [
        (torch.float32, 2**24), (torch.float32, 1), (torch.float32, 2**25), (torch.float32, 4), (torch.int64, 5),
    ]  # fmt: skip


class GPUGroup:
    """Stand-in of torch's process groups; records its arguments and calls."""

    made: list[GPUGroup]
    Options = SimpleNamespace
    _Options = SimpleNamespace

    def __init__(self, below: Any, index: int, count: int, options: Any) -> None:
        below.set("mark", type(self).__name__)
        self.place, self.options, self.calls = (index, count), vars(options), []
        GPUGroup.made.append(self)

    @staticmethod
    def create_device(hostname: str) -> str:
        return hostname

    def set_timeout(self, timeout: timedelta) -> None:
        self.calls.append(timeout)

    def abort(self) -> None:
        self.calls.append("abort")
        raise RuntimeError("already aborted")


class NCCLGroup(GPUGroup):
    """Stand-in of NCCL."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[GPUGroup]:
    GPUGroup.made = []
    monkeypatch.setattr(dist, "ProcessGroupGloo", GPUGroup)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCLGroup, raising=False)
    return GPUGroup.made


def test_a_group_on_a_gpu_has_gloo_and_nccl_apart_with_its_timeout(made: list[GPUGroup]) -> None:
    kept: Any
    kept, address = store()
    found = ReplicaGroup(address, "key", 0, 1, "10.0.0.7", 30.0, torch.device("cuda"), lambda _index: True)
    gloo, nccl = made
    # Connecting has a shorter limit: all members were there a moment ago.
    assert gloo.options == {"_devices": ["10.0.0.7"], "_timeout": timedelta(seconds=5)}
    assert gloo.calls == [timedelta(seconds=30)]
    assert nccl.options == {"_timeout": timedelta(seconds=30)}
    assert gloo.place == nccl.place == (0, 1)
    assert (kept.get("key/gloo/mark"), kept.get("key/nccl/mark")) == (b"GPUGroup", b"NCCLGroup")
    found.abort()
    assert (gloo.calls[1:], nccl.calls) == (["abort"], ["abort"])


def test_a_group_on_the_cpu_has_gloo_only(made: list[GPUGroup]) -> None:
    _kept, address = store()
    found = ReplicaGroup(address, "key", 0, 1, "10.0.0.7", 30.0, torch.device("cpu"), lambda _index: True)
    assert [type(one) for one in made] == [GPUGroup]
    found.abort()
    assert made[0].calls == [timedelta(seconds=30), "abort"]
