"""A group of replicas is not waited for if a member has died, and its sums are exact for all dtypes."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

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
    with pytest.raises(RuntimeError):
        ReplicaGroup(address, "key", 1, 2, "127.0.0.1", 30.0, torch.device("cpu"), lambda one: bool(asked.append(one)))
    assert asked == [0]


def test_sums_keep_dtypes_shapes_and_order_and_a_lost_member_ends_them() -> None:
    _kept, address = store()

    def member(index: int) -> list[torch.Tensor]:
        made = ReplicaGroup(address, "key", index, 2, "127.0.0.1", 30.0, torch.device("cpu"))
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
