"""Replicas in threads meet, sum, lose one of them, and heal; with a coordinator in memory, gloo and the transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.elastic import Attempt
from d9d_core.errors import JobError, TrainingError
from d9d_torchft import replicas
from d9d_torchft.config import TorchFTConfig
from d9d_torchft.coordination import Lighthouse, waited
from d9d_torchft.members import Member
from d9d_torchft.replicas import TorchFTReplicas
from d9d_torchft.settings import Settings
from torch import Tensor
from torch import distributed as dist

CONFIG: dict[str, Any] = {"timeout": 10.0, "quorum_timeout": 10.0}


class MemoryLighthouse:
    """Coordinator in memory: a quorum is complete when all living replicas have asked."""

    def __init__(self, *alive: str) -> None:
        self.alive = set(alive)
        self._changed = threading.Condition()
        self._asked: dict[str, Member] = {}
        self._rounds: list[list[Member]] = []

    def set_alive(self, *names: str) -> None:
        with self._changed:
            self.alive = set(names)
            self._asked = {name: one for name, one in self._asked.items() if name in names}
            self._complete()

    def coordinator(self, _settings: Settings) -> Any:
        return SimpleNamespace(quorum=self._quorum, close=lambda: None)

    def _quorum(self, member: Member, seconds: float, stops: Callable[[], bool]) -> Sequence[Member] | None:
        with self._changed:
            round_ = len(self._rounds)
            self._asked[member.name] = member
            self._complete()
            if not self._changed.wait_for(lambda: len(self._rounds) > round_ or stops(), seconds):
                raise TrainingError("no quorum")
            if len(self._rounds) == round_:
                return None
            return self._rounds[round_]

    def _complete(self) -> None:
        if self.alive and self._asked.keys() >= self.alive:
            self._rounds.append(sorted(self._asked.values(), key=lambda one: one.name))
            self._asked = {}
            self._changed.notify_all()


@dataclass
class State:
    """State of a replica: a tensor, and the number of steps."""

    tensor: Tensor
    step: int = 0
    taken: list[int] = field(default_factory=list)
    stopping: bool = False

    def tensors(self) -> Mapping[str, Tensor]:
        return {"tensor": self.tensor}

    def values(self) -> dict[str, Any]:
        return {"step": self.step}

    def stops(self) -> bool:
        return self.stopping

    def take(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.step = values["step"]
        self.tensor.copy_(tensors["tensor"])
        self.taken.append(self.step)


class Fleet:
    """Replicas in threads, each with a state."""

    def __init__(self, directory: Path, *names: str, **config: Any) -> None:
        self.lighthouse = MemoryLighthouse(*names)
        self._token = directory / "token"
        self._token.write_text("a secret of the job")
        self._config = CONFIG | config
        self.replicas: dict[str, TorchFTReplicas] = {}
        self.states: dict[str, State] = {}
        for index, name in enumerate(names):
            self.add(name, float(index))

    def add(self, name: str, value: float = -1.0, token: str | None = None, ranks: int = 1) -> None:
        environ = {
            "D9D_TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1",
            "D9D_TORCHFT_REPLICA": name,
            "D9D_TORCHFT_TOKEN_FILE": str(self._token),
        }
        if token is not None:
            environ["D9D_TORCHFT_TOKEN_FILE"] = str(self._token.with_name("other"))
            self._token.with_name("other").write_text(token)
        topology: Any = SimpleNamespace(
            rank=0, world_size=ranks, device=torch.device("cpu"), axes_group=lambda *_axes: None
        )
        config = TorchFTConfig(**self._config)
        self.replicas[name] = TorchFTReplicas(config, topology, environ, self.lighthouse.coordinator)
        self.states[name] = State(torch.full((3,), value))

    def each(self, call: Callable[[str], Any], *names: str) -> dict[str, Any]:
        """Results of a call for some replicas, in threads."""
        chosen = names or tuple(sorted(self.lighthouse.alive))
        with ThreadPoolExecutor(len(chosen)) as pool:
            return dict(zip(chosen, pool.map(call, chosen), strict=True))

    def meet(self, name: str) -> Attempt:
        attempt = self.replicas[name].meet(self.states[name].step, self.states[name])
        assert attempt is not None
        return attempt

    def step(self, name: str) -> tuple[Attempt, float, bool]:
        """Make an attempt in which each replica adds 1 to a sum; a committed step adds the sum to the state."""
        attempt = self.meet(name)
        numbers = [torch.ones(2), torch.ones(2, 2, dtype=torch.float64), torch.tensor(3), torch.zeros(0)]
        self.replicas[name].reduce(numbers, "sum")
        largest = torch.tensor([attempt.index])
        self.replicas[name].reduce([largest], "max")
        committed = self.replicas[name].commit()
        if committed:
            assert numbers[1].unique().tolist() == [attempt.count]
            assert numbers[2].item() == 3 * attempt.count
            assert largest.item() == attempt.count - 1
            self.states[name].tensor += numbers[0].sum()
            self.states[name].step += 1
        return attempt, numbers[0][0].item(), committed

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    made = Fleet(tmp_path, "a", "b", "c")
    yield made
    made.close()


def test_replicas_heal_at_the_start_sum_and_go_on_without_a_lost_one_which_comes_back(fleet: Fleet) -> None:
    for step in range(2):
        found = fleet.each(fleet.step)
        assert [replica._opened.server._offer for replica in fleet.replicas.values()] == [None] * 3  # type: ignore[union-attr]
        assert {value for _, value, _ in found.values()} == {3.0}
        assert [attempt.source for attempt, _, _ in found.values()] == ([None, "a", "a"] if step == 0 else [None] * 3)
        assert [attempt.index for attempt, _, _ in found.values()] == [0, 1, 2]
        assert len({attempt.key for attempt, _, _ in found.values()}) == 1
    assert {tuple(state.tensor.tolist()) for state in fleet.states.values()} == {(12.0, 12.0, 12.0)}

    # One dies after it has met: none commits; the others repeat the step, and later it takes their state.
    fleet.each(fleet.meet)
    fleet.replicas["b"].close()
    fleet.lighthouse.set_alive("a", "c")

    def finish(name: str) -> bool:
        fleet.replicas[name].reduce([torch.ones(2)], "sum")
        return fleet.replicas[name].commit()

    assert fleet.each(finish) == {"a": False, "c": False}
    assert [fleet.states[name].step for name in "ac"] == [2, 2]
    found = fleet.each(fleet.step)
    assert [(attempt.replicas, value, committed) for attempt, value, committed in found.values()] == [
        (("a", "c"), 2.0, True)
    ] * 2

    fleet.lighthouse.set_alive("a", "b", "c")
    fleet.add("b")
    found = fleet.each(fleet.step)
    assert found["b"][0].source == "a"
    assert fleet.states["b"].taken == [3]
    assert {value for _, value, _ in found.values()} == {3.0}
    assert {tuple(state.tensor.tolist()) for state in fleet.states.values()} == {(22.0, 22.0, 22.0)}
    assert {state.step for state in fleet.states.values()} == {4}


def test_a_replica_that_dies_between_the_quorum_and_the_connection_is_noticed_at_once(fleet: Fleet) -> None:
    fleet.each(fleet.step)
    # It asks for the quorum, and is gone when the others want to connect.
    fleet.add("b")
    gone = fleet.replicas["b"]

    def ask_in_vain() -> None:
        with pytest.raises(TrainingError, match="killed"):
            fleet.meet("b")

    ask = threading.Thread(target=ask_in_vain)
    original = fleet.lighthouse._quorum

    def quorum(member: Member, seconds: float, stops: Callable[[], bool]) -> Sequence[Member] | None:
        found = original(member, seconds, stops)
        if member.name == "b":
            assert gone._opened is not None
            gone._opened.server.close()
            fleet.lighthouse.set_alive("a", "c")
            raise TrainingError("killed")
        return found

    fleet.lighthouse._quorum = quorum  # type: ignore[method-assign]
    ask.start()
    found = fleet.each(fleet.step, "a", "c")
    ask.join()
    assert [(attempt.replicas, committed) for attempt, _, committed in found.values()] == [(("a", "c"), True)] * 2


def test_a_replica_with_another_token_or_size_or_the_same_name_is_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    fleet.each(fleet.step)
    fleet.lighthouse.set_alive("a", "b")
    fleet.add("b", token="another secret of a job")

    def refused(name: str) -> str:
        with pytest.raises(TrainingError) as caught:
            fleet.meet(name)
        return str(caught.value)

    assert all("cannot take part: it has another token" in text for text in fleet.each(refused).values())
    fleet.lighthouse.set_alive("b")
    fleet.add("b", ranks=2)
    assert "replica 'b' has 1 ranks, this one 2; start all replicas with the same mesh" in refused("b")
    fleet.close()

    fleet = Fleet(tmp_path, "a")
    first = fleet.replicas["a"]
    fleet.each(fleet.step)
    other = Member("a", "another process", 3, "", 0, "127.0.0.1:1", ("127.0.0.1:1",))
    fleet.lighthouse.coordinator = lambda _: None  # type: ignore[method-assign, return-value, assignment]
    assert first._opened is not None
    first._opened.coordinator = SimpleNamespace(quorum=lambda *_: [other], close=lambda: None)  # type: ignore[assignment]
    assert "another process is the replica 'a'" in refused("a")
    fleet.close()


def test_replicas_that_made_the_same_step_apart_are_brought_to_one_state(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    fleet.each(fleet.step)
    fleet.each(fleet.meet)

    def disconnected(*_: Any) -> None:
        raise RuntimeError("connection reset")

    def lose(name: str) -> bool:
        fleet.replicas[name]._group.reduce = disconnected  # type: ignore[union-attr, method-assign]
        fleet.replicas[name].reduce([torch.ones(2)], "sum")
        return fleet.replicas[name].commit()

    # The network fails, and each replica makes the next step alone.
    assert fleet.each(lose) == {"a": False, "b": False}
    for name, others in (("a", 1.0), ("b", 2.0)):
        fleet.lighthouse.set_alive(name)
        fleet.step(name)
        fleet.states[name].tensor += others
    fleet.lighthouse.set_alive("a", "b")
    found = fleet.each(fleet.step)
    assert [attempt.source for attempt, _, _ in found.values()] == [None, "a"]
    assert torch.equal(fleet.states["a"].tensor, fleet.states["b"].tensor)
    assert [attempt.source for attempt, _, _ in fleet.each(fleet.step).values()] == [None, None]
    fleet.close()


def test_replicas_that_part_without_a_failure_connect_at_once_when_they_meet_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b", "c")
    fleet.each(fleet.step)
    first = {name: replica._key for name, replica in fleet.replicas.items()}
    fleet.lighthouse.set_alive("a", "c")  # b is left out of one quorum, with its group still open
    assert all(committed for _, _, committed in fleet.each(fleet.step, "a", "c").values())
    fleet.lighthouse.set_alive("a", "b", "c")
    found = fleet.each(fleet.step)
    assert all(committed for _, _, committed in found.values())
    assert [attempt.source for attempt, _, _ in found.values()] == [None, "a", None]
    keys = {replica._key for replica in fleet.replicas.values()}
    assert len(keys) == 1
    assert not keys & set(first.values())
    assert [replica._failures for replica in fleet.replicas.values()] == [0, 0, 0]
    fleet.close()


def test_too_few_replicas_are_an_error_after_a_while(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", min_replicas=2, quorum_timeout=0.3)
    with pytest.raises(TrainingError, match=r"1 of 2 replicas \(min_replicas\) came within 0.3 s"):
        fleet.meet("a")
    fleet.close()


def test_replicas_that_have_just_taken_a_state_keep_it_although_the_attempt_fails(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    assert [attempt.source for attempt in fleet.each(fleet.meet).values()] == [None, "a"]

    def disconnected(*_: Any) -> None:
        raise RuntimeError("connection reset")

    def lose(name: str) -> bool:
        fleet.replicas[name]._group.reduce = disconnected  # type: ignore[union-attr, method-assign]
        fleet.replicas[name].reduce([torch.ones(2)], "sum")
        return fleet.replicas[name].commit()

    assert fleet.each(lose) == {"a": False, "b": False}
    found = fleet.each(fleet.step)
    assert [(attempt.source, committed) for attempt, _, committed in found.values()] == [(None, True)] * 2
    for replica in fleet.replicas.values():  # after a step, no state is offered that the next step changes
        assert replica._opened is not None
        assert replica._opened.server._offer is None
    fleet.close()


@pytest.mark.parametrize(("limit", "least"), [(50.0, 45.0), (0.3, 1.0)])
def test_a_quorum_may_take_the_time_that_is_left_and_a_second_at_least(
    limit: float, least: float, tmp_path: Path
) -> None:
    fleet, asked = Fleet(tmp_path, "a", quorum_timeout=limit), []

    def quorum(member: Member, seconds: float, _stops: Callable[[], bool]) -> Sequence[Member]:
        asked.append(seconds)
        return [member]

    fleet.lighthouse._quorum = quorum  # type: ignore[method-assign]
    fleet.meet("a")
    assert least <= asked[0] <= max(limit, 1.0)
    fleet.close()


def test_a_group_is_left_when_its_members_meet_in_another_one(tmp_path: Path) -> None:
    fleet, left = Fleet(tmp_path, "a", "b"), []
    fleet.each(fleet.step)
    for name, replica in fleet.replicas.items():
        end = replica._group.abort  # type: ignore[union-attr]
        replica._group.abort = lambda name=name, end=end: (left.append(name), end())  # type: ignore
    fleet.each(fleet.step)
    assert left == []
    fleet.lighthouse.set_alive("a")
    fleet.step("a")
    assert left == ["a"]
    fleet.close()
    assert left == ["a", "b"]


class Ranks:
    """Ranks of one replica, as threads; a stand-in of the collectives of ``torch.distributed``."""

    ReduceOp = dist.ReduceOp
    TCPStore = dist.TCPStore  # type: ignore[attr-defined]

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self._barrier, self._values = rank, barrier, values

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._values[self.rank] = tensor.clone()
        self._barrier.wait(10)
        found = list(self._values)
        self._barrier.wait(10)
        return found

    @staticmethod
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: Ranks) -> None:
        together = torch.stack(group._all(tensor))
        tensor.copy_(together.sum(0) if op == dist.ReduceOp.SUM else together.amin(0))

    @staticmethod
    def broadcast(tensor: Tensor, *, group_src: int, group: Ranks) -> None:
        tensor.copy_(group._all(tensor)[group_src])


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Two replicas, a and b, of two ranks each: a0, a1, b0 and b1."""
    monkeypatch.setattr(replicas, "dist", Ranks)
    fleet = Fleet(tmp_path, "a", "b")
    for index, name in enumerate("ab"):
        barrier, values = threading.Barrier(2), [None, None]
        for rank in range(2):
            fleet.add(name, float(10 * index + rank), ranks=2)
            made, state = fleet.replicas.pop(name), fleet.states.pop(name)
            axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
            group = {axes: Ranks(rank, barrier, values)}
            made._topology = SimpleNamespace(  # type: ignore[assignment]
                rank=rank, world_size=2, device=torch.device("cpu"), axes_group=lambda *on, group=group: group[on]
            )
            fleet.replicas[f"{name}{rank}"], fleet.states[f"{name}{rank}"] = made, state
    yield fleet
    fleet.close()


ALL = ("a0", "a1", "b0", "b1")


def test_each_rank_sums_with_the_same_rank_of_other_replicas_and_takes_its_state(pair: Fleet) -> None:
    for step in range(2):
        found = pair.each(pair.step, *ALL)
        assert [attempt.source for attempt, _, _ in found.values()] == [
            None,
            None,
            *(["a"] * 2 if not step else [None] * 2),
        ]
        assert [attempt.index for attempt, _, _ in found.values()] == [0, 0, 1, 1]
        assert {(value, committed) for _, value, committed in found.values()} == {(2.0, True)}
        assert len({attempt.key for attempt, _, _ in found.values()}) == 1
    assert [pair.states[name].tensor[0].item() for name in ALL] == [8.0, 9.0, 8.0, 9.0]
    assert [pair.states[name].taken for name in ALL] == [[], [], [0], [0]]


def test_a_rank_that_has_lost_a_replica_takes_the_step_back_on_all_ranks(pair: Fleet) -> None:
    pair.each(pair.step, *ALL)

    def attempt(name: str) -> bool:
        replica = pair.replicas[name]
        pair.meet(name)
        if name == "b1":

            def lost(*_: Any) -> None:
                raise RuntimeError("connection reset")

            replica._group.reduce = lost  # type: ignore[union-attr, method-assign]
        replica.reduce([torch.ones(2)], "sum")
        return replica.commit()

    assert pair.each(attempt, *ALL) == dict.fromkeys(ALL, False)
    found = pair.each(pair.step, *ALL)
    assert {(value, committed) for _, value, committed in found.values()} == {(2.0, True)}
    assert [pair.states[name].step for name in ALL] == [2] * 4


def test_an_error_of_the_first_rank_is_an_error_of_all_ranks(pair: Fleet) -> None:
    def quorum(*_: Any) -> Any:
        raise TrainingError("no lighthouse")

    pair.lighthouse._quorum = quorum  # type: ignore[method-assign]

    def refused(name: str) -> str:
        with pytest.raises(TrainingError) as caught:
            pair.meet(name)
        return str(caught.value)

    assert pair.each(refused, *ALL) == dict.fromkeys(ALL, "no lighthouse")


class GPUGroup:
    """Stand-in of a group with operations on a GPU."""

    def __init__(self, landed: bool, reached: bool) -> None:
        self.launched, self._landed, self._reached, self.left = True, landed, reached, False

    def landed(self) -> bool:
        return self._landed

    def all(self, held: bool) -> bool:
        if not self._reached:
            raise RuntimeError("connection reset")
        return held

    def abort(self) -> None:
        self.left = True


@pytest.mark.parametrize(("landed", "reached"), [(True, True), (False, True), (True, False)])
def test_a_step_on_a_gpu_is_committed_if_its_sums_have_landed_and_all_replicas_answer(
    landed: bool, reached: bool, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, "a")
    fleet.meet("a")
    replica, group = fleet.replicas["a"], GPUGroup(landed, reached)
    replica._group = group  # type: ignore[assignment]
    assert replica.commit() is (landed and reached)
    assert group.left is not (landed and reached)
    fleet.close()


def test_a_replica_alone_needs_no_group(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    assert [fleet.step("a")[1:] for _ in range(3)] == [(1.0, True)] * 3
    assert fleet.replicas["a"]._group is None
    fleet.close()


def test_nothing_is_opened_before_the_first_meeting_and_missing_settings_are_an_error() -> None:
    topology: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), axes_group=lambda *_: None)
    alone = TorchFTReplicas(TorchFTConfig(), topology, {})
    alone.close()
    with pytest.raises(JobError, match="D9D_TORCHFT_LIGHTHOUSE"):
        alone.meet(0, State(torch.zeros(1)))


def test_without_torchft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchft.coordination", None)
    with pytest.raises(JobError, match=r"install it: pip install 'torchft==0.2"):
        Lighthouse("http://127.0.0.1:1", "a")


def test_a_call_in_a_thread_returns_its_value_and_raises_its_error() -> None:
    assert waited(lambda: 5, lambda: True) == 5
    with pytest.raises(ZeroDivisionError):
        waited(lambda: 1 // 0, lambda: False)
    goes_on = threading.Event()
    assert waited(goes_on.wait, lambda: True) is None
    goes_on.set()
    assert waited(lambda: threading.Event().wait(0.5) or 5, lambda: False) == 5


def test_a_replica_that_is_asked_to_stop_waits_for_the_others_no_longer(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", min_replicas=2, quorum_timeout=30.0)
    state = fleet.states["a"]
    timer = threading.Timer(0.3, lambda: setattr(state, "stopping", True))
    timer.start()
    assert fleet.replicas["a"].meet(0, state) is None
    fleet.close()
