"""Release of memory by tags, of communicators, and a restore that fails half-way, without a device."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError, TrainingError
from d9d_engine.sleep import communicators, sleeper
from d9d_engine.sleep.offload import Offloaded, offload
from d9d_engine.sleep.sleeper import TAGS, Sleeper
from torch import Tensor
from torch import distributed as dist

CPU = torch.device("cpu")


class Backend:
    """Backend of a process group that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def suspend(self) -> None:
        self.calls.append("suspend")

    def resume(self) -> None:
        self.calls.append("resume")


class Old:
    """Backend that cannot be suspended."""


def groups(monkeypatch: pytest.MonkeyPatch, *backends: dict[str, object]) -> None:
    def group(of: dict[str, object]) -> Any:
        devices = [torch.device(name) for name in of]
        return SimpleNamespace(_device_types=devices, _get_backend=lambda device: of[device.type])

    monkeypatch.setattr(communicators, "process_groups", lambda: [group(of) for of in backends])


def test_communicators_of_devices_are_suspended_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    host, first, second = Backend(), Backend(), Backend()
    groups(monkeypatch, {"cpu": host, "cuda": first}, {"cpu": host}, {"cuda": second})
    assert communicators.suspend() == 2
    communicators.resume()
    assert (host.calls, first.calls, second.calls) == ([], ["suspend", "resume"], ["suspend", "resume"])


def test_gloo_has_no_memory_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gloo(Backend):
        pass

    gloo, nccl = Gloo(), Backend()
    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: True)
    groups(monkeypatch, {"cuda": gloo}, {"cuda": nccl})
    assert communicators.suspend() == 1
    assert (gloo.calls, nccl.calls) == ([], ["suspend"])


def test_a_torch_that_cannot_suspend_leaves_all_communicators_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    groups(monkeypatch, {"cuda": backend}, {"cuda": Old()})
    with pytest.raises(BuildError, match=r"sleep\('communicators'\): Old of torch .* cannot release its memory"):
        communicators.suspend()
    assert backend.calls == []


def made(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> tuple[Sleeper, dict[str, list[Tensor]]]:
    tensors = {"weights": [torch.ones(4)], "optimizer": [torch.ones(2), torch.ones(8, device="meta")]}
    monkeypatch.setattr(sleeper, "suspend", lambda: calls.append("suspend"))
    monkeypatch.setattr(sleeper, "resume", lambda: calls.append("resume"))
    return Sleeper({"weights": lambda: tensors["weights"], "optimizer": lambda: tensors["optimizer"]}, CPU), tensors


def test_tags_sleep_once_and_wake_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    own, tensors = made(monkeypatch, calls)
    assert own.sleep(["optimizer"]) == 8
    assert own.sleep(["weights", "optimizer", "communicators"]) == 16
    assert (own.asleep, calls) == (("optimizer", "weights", "communicators"), ["suspend"])
    assert [tensor.untyped_storage().nbytes() for tensor in (tensors["weights"][0], tensors["optimizer"][0])] == [0, 0]
    assert own.wake(["weights", "communicators"]) == 16
    assert (own.asleep, calls) == (("optimizer",), ["suspend", "resume"])
    assert own.wake(TAGS) == 8
    assert own.wake(TAGS) == 0
    assert (own.asleep, calls) == ((), ["suspend", "resume"])
    assert tensors["weights"][0].tolist() == [1.0] * 4


def test_a_sleep_that_fails_wakes_its_tags_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own, tensors = made(monkeypatch, [])
    own.sleep(["optimizer"])

    def fail() -> None:
        raise BuildError("too old")

    monkeypatch.setattr(sleeper, "suspend", fail)
    with pytest.raises(BuildError, match="too old"):
        own.sleep(TAGS)
    assert own.asleep == ("optimizer",)
    assert tensors["weights"][0].tolist() == [1.0] * 4


def test_tags_are_checked_and_brought_into_order(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = made(monkeypatch, [])
    assert own.settle([]) == ["weights", "optimizer", "communicators"]
    assert own.settle(["communicators", "weights"]) == ["weights", "communicators"]
    with pytest.raises(
        TrainingError, match="^'x' is no tag of memory to release; choose among weights, optimizer, com"
    ):
        own.settle(["weights", "x"])


def test_a_restore_without_memory_loses_nothing_and_can_be_repeated() -> None:
    tensors = [torch.arange(4.0), torch.arange(8.0)]
    offloaded = offload(tensors)
    stored = cast("Any", offloaded)._stored

    class Storage:
        """Storage that has no room once."""

        def __init__(self, of: Any) -> None:
            self.of, self.fails, self.device = of, True, of.device

        def resize_(self, size: int) -> None:
            if self.fails:
                self.fails = False
                raise torch.OutOfMemoryError("no room")
            self.of.resize_(size)

    own = stored[1].storage
    failing: Iterable[Any] = [stored[0], SimpleNamespace(storage=Storage(own), bytes=32, at=16)]
    broken = Offloaded(list(failing), cast("Any", offloaded)._chunks)
    assert broken.bytes == 48
    with pytest.raises(torch.OutOfMemoryError):
        broken.restore()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]
    offloaded.restore()
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_tensors_that_are_not_on_the_device_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(True))
    weight = torch.ones(4)
    own = Sleeper({"weights": lambda: [weight]}, torch.device("cuda"))
    assert own.sleep(["weights"]) == 0
    assert (weight.untyped_storage().nbytes(), emptied) == (16, [True])
    assert own.wake(["weights"]) == 0
    Sleeper({"weights": lambda: [weight]}, CPU).sleep(["weights"])
    assert (weight.untyped_storage().nbytes(), emptied) == (0, [True])
