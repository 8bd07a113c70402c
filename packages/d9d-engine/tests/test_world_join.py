"""Ranks compare jobs and plugins before they communicate, and leave without noise."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import D9dError, JobError, PluginError, TrainingError
from d9d_core.registry.manifest import Manifest
from d9d_engine.distributed import world as world_module
from d9d_engine.distributed.devices import device_of
from d9d_engine.distributed.world import joined, process_groups
from d9d_engine.process_env import ProcessEnv
from d9d_engine.supervision import identity as identity_module
from d9d_engine.supervision.failure import ErrorFile, FailureReporter
from d9d_engine.supervision.identity import Identity, agree, spell_ranks
from d9d_engine.supervision.watchdog import Watchdog
from d9d_testing.processes import LOOPBACK, listening_at
from torch import distributed as dist

CPU = torch.device("cpu")
TIMEOUTS = {"startup": 20.0, "step": 20.0, "checkpoint": 40.0}


def sizes(world_size: int) -> dict[str, int]:
    return {"pp": 1, "dp_replicate": 1, "dp_shard": world_size, "cp": 1, "tp": 1, "ep": 1}


def identity(moe: str = "0.1.0", torch_version: str | None = None, **job: Any) -> Identity:
    facts = {"version": moe, "editable": False, "sha256": None}
    found = Identity.of(Manifest({"d9d-moe": facts}), {"batch": {"size": 8}, "plugins": {"files": [moe]}, **job})
    return found if torch_version is None else Identity({"torch": torch_version}, found.plugins, found.job)


def process_env(**changes: Any) -> ProcessEnv:
    """This process of a test world; rank 0 is on node-a, the others on node-b."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values: dict[str, Any] = {"node": "node-b" if rank else "node-a", "launcher": "torchrun", **changes}
    return ProcessEnv(rank, size, rank, size, **values)


class CountingStore:
    """A store that all ranks have left; the other ranks report it one by one."""

    def __init__(self) -> None:
        self.gone = 0

    def add(self, key: str, amount: int) -> int:
        self.gone += key == "gone" and amount == 0  # each question finds one more
        return self.gone if key == "gone" else 0

    def check(self, keys: list[str]) -> bool:
        return keys == ["all-left"]


def test_the_process_with_the_store_stays_until_all_others_have_asked_their_last_question() -> None:
    store = CountingStore()
    world_module._leave_together(cast("Any", store), ProcessEnv(0, 4, 0, 4), 1)
    assert store.gone == 3


# --- agreement -------------------------------------------------------------------------------------------------------


def join_with(identities: list[dict[str, Any]]) -> str:
    here = process_env()
    try:
        with joined(here, CPU, identity(**identities[here.rank]), sizes(here.world_size), TIMEOUTS):
            total = torch.ones(1)
            dist.all_reduce(total)
            return f"joined {int(total)}"
    except D9dError as error:
        return f"{type(error).__name__}: {error}"


def watched() -> list[float]:
    """Pause between two looks of the watchdog, and the time that a rank has to end by itself."""
    found: list[float] = []

    class Recorder(Watchdog):
        def start(self, alarm: Any, pause: float) -> None:
            found.extend((pause, alarm.grace))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "Watchdog", Recorder)
        with joined(process_env(), CPU, identity(), sizes(2), {"startup": 40.0, "step": 2.0, "checkpoint": 90.0}):
            return found


@pytest.mark.thorough
def test_the_watchdog_looks_often_enough_for_the_shortest_limit(world: Callable[..., Any]) -> None:
    assert world(2).run(watched) == [[0.5, 2.0]] * 2


def test_equal_ranks_join_and_an_existing_group_stays(world: Callable[..., Any]) -> None:
    assert world(2).run(join_twice) == ["joined 2, joined 2, True"] * 2


def join_twice() -> str:
    return f"{join_with([{}, {}])}, {join_with([{}, {}])}, {dist.is_initialized()}"


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (
            {"moe": "0.1.1"},
            "PluginError: plugin sets differ across ranks: d9d-moe: rank 0 (node-a) 0.1.0, rank 2 (node-b) 0.1.1; "
            "install the same versions on all machines",
        ),
        (
            {"batch": {"size": 16}, "model": {"name": "x"}},
            "JobError: the job differs across ranks: batch.size: rank 0 (node-a) 8, rank 2 (node-b) 16\n"
            'the job differs across ranks: model.name: rank 0 (node-a) unset, rank 2 (node-b) "x"; '
            "start all machines with the same job file and options",
        ),
    ],
)
def test_a_difference_is_the_same_error_on_all_ranks(world: Callable[..., Any], odd: dict[str, Any], text: str) -> None:
    assert world(3).run(join_with, [{}, {}, odd]) == [text] * 3


def in_threads(
    identities: list[Identity], nodes: list[str], timeout: float = 20.0, each_alone: bool = False
) -> list[BaseException | None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    outcomes: list[BaseException | None] = [None] * len(identities)

    def rank(number: int) -> None:
        local = (0, 1) if each_alone else (number, len(nodes))
        here = ProcessEnv(number, len(nodes), *local, nodes[number], "slurm")
        try:
            agree(store, here, identities[number], timeout)
        except D9dError as error:
            outcomes[number] = error

    threads = [
        threading.Thread(target=rank, args=(number,), name=f"rank {number}") for number in range(len(identities))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_ranks_that_differ_alike_share_a_line() -> None:
    other = identity(moe="0.2.0")
    found = in_threads([identity()] * 4 + [other] * 4, ["a"] * 4 + ["b"] * 2 + ["c"] * 2)
    assert {type(error) for error in found} == {PluginError}
    assert str(found[7]) == (
        "plugin sets differ across ranks: d9d-moe: rank 0 (a) 0.1.0, ranks 4-7 (b, c) 0.2.0; "
        "install the same versions on all machines"
    )


def test_another_torch_is_an_error() -> None:
    found = in_threads([identity(torch_version="2.11.0"), identity(torch_version="2.15.0")], ["a", "b"])
    assert [type(error) for error in found] == [JobError, JobError]
    assert str(found[1]) == (
        "software differs across ranks: torch: rank 0 (a) 2.11.0, rank 1 (b) 2.15.0; "
        "install the same versions on all machines"
    )


def test_versions_are_told_before_the_jobs_that_they_change() -> None:
    here = identity()
    there = replace(here, software={**here.software, "d9d-core": "0.2.0"}, job={"batch.size": "9"})
    found = in_threads([here, there], ["a", "b"])
    assert str(found[0]).startswith("software differs across ranks: d9d-core: rank 0 (a) ")
    assert "rank 1 (b) 0.2.0; install the same versions" in str(found[0])
    assert "the job differs" not in str(found[0])


@pytest.mark.parametrize(("apart", "said"), [(7200, "7,200 s behind"), (-7200, "7,200 s ahead of"), (5, None)])
def test_clocks_that_are_apart_are_told_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, apart: int, said: str | None
) -> None:
    real = time.time

    def clock() -> float:  # the thread of rank 0 sees another machine's clock
        return real() + (apart if threading.current_thread().name == "rank 0" else 0)

    monkeypatch.setattr("d9d_engine.supervision.identity.time.time", clock)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert in_threads([identity()] * 2, ["a", "b"], each_alone=True) == [None, None]
    texts = [str(one.message) for one in told if "clock of" in str(one.message)]
    assert len(texts) == (said is not None)
    assert all(f"the clock of b is {said} the clock of a" in text for text in texts)


def test_paths_of_plugin_files_may_differ() -> None:
    one, two = identity(plugins={"files": ["/a/x.py"]}), identity(plugins={"files": ["/b/x.py"]})
    assert in_threads([one, two], ["a", "b"]) == [None, None]


def test_ranks_that_do_not_arrive_are_named_by_all_others() -> None:
    found = in_threads([identity()] * 2, ["a"] * 6, timeout=0.3)
    assert {type(error) for error in found} == {TrainingError}
    assert "ranks 2-5 of 6 did not arrive within 0.3 s (timeouts.startup)" in str(found[0])
    assert str(found[0]) == str(found[1])


@pytest.mark.thorough
def test_without_rank_0_the_others_say_so() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="rank 0 did not arrive within 0.2 s"):
        agree(store, ProcessEnv(1, 2, 0, 1, "b", "slurm"), identity(), 0.2)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([7, 0, 2, 1], "ranks 0-2, 7"), ([1, 3], "ranks 1, 3")]
)
def test_ranks_are_spelled_shortly(ranks: list[int], text: str) -> None:
    assert spell_ranks(ranks) == text


# --- the process group -----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_process_alone_gets_a_group_for_the_block_without_a_warning() -> None:
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with joined(ProcessEnv(node="here"), CPU, identity(), sizes(1), TIMEOUTS) as found:
            total = torch.ones(1)
            dist.all_reduce(total)
            assert (found.env.world_size, int(total), dist.get_backend()) == (1, 1, "gloo")
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_an_error_leaves_the_block_and_the_group() -> None:
    with pytest.raises(ValueError, match="mine"), joined(ProcessEnv(node="here"), CPU, identity(), sizes(1), TIMEOUTS):
        raise ValueError("mine")
    assert not dist.is_initialized()


def join_anew(port: int, directory: Path, fails: bool) -> tuple[str, bool, float]:
    """Meet through a TCP store, as under Slurm."""
    here = process_env(launcher="slurm", master=("127.0.0.1", port))
    dist.destroy_process_group()
    limits, outcome = dict(TIMEOUTS), "left"
    reporter = FailureReporter(f"rank {here.rank}", ErrorFile(directory / str(here.rank)))
    try:
        with joined(here, CPU, identity(), sizes(2), limits, reporter) as found:
            half = dist.new_group([here.rank], use_local_synchronization=True, timeout=timedelta(seconds=1))
            found.watchdog.phase("step", 0)
            backends = [group._get_backend(CPU) for group in process_groups()]
            limit = min(backend.options._timeout.total_seconds() for backend in backends)
            assert half in process_groups()
            if fails and here.rank == 1:
                int("here")
            total = torch.ones(1)
            dist.all_reduce(total)  # the other rank never comes if it fails
    except (ValueError, RuntimeError) as error:
        outcome = type(error).__name__
    return outcome, dist.is_initialized(), limit


def test_ranks_meet_at_a_port_and_all_groups_get_the_longest_limit(world: Callable[..., Any], tmp_path: Path) -> None:
    assert world(2).run(join_anew, free_port(), tmp_path, False) == [("left", False, 100.0)] * 2


def listening_while_joined(port: int, host: str, local: int) -> list[str]:
    """Addresses on which this process listens when ranks meet at a port, as under Slurm."""
    here = process_env(launcher="slurm", master=(host, port))
    here = replace(here, local_rank=0 if local == 1 else here.rank, local_world_size=local)
    dist.destroy_process_group()
    with joined(here, CPU, identity(), sizes(2), TIMEOUTS):
        dist.new_group([0, 1])
        dist.barrier()
        return listening_at(os.getpid())


def test_ranks_of_one_machine_listen_for_it_alone_wherever_they_were_told_to_meet(world: Callable[..., Any]) -> None:
    for addresses in world(2).run(listening_while_joined, free_port(), socket.gethostname(), 2):
        assert addresses
        assert set(addresses) <= LOOPBACK


def test_a_store_listens_only_at_the_address_that_was_told(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for addresses in world(2).run(listening_while_joined, free_port(), "127.0.0.1", 1):
        assert addresses
        assert set(addresses) <= LOOPBACK


def test_a_rank_that_fails_frees_the_others_and_alone_tells(world: Callable[..., Any], tmp_path: Path) -> None:
    first, second = world(2).run(join_anew, free_port(), tmp_path, True)
    assert (first[:2], second[:2]) == (("RuntimeError", False), ("ValueError", False))
    assert "invalid literal" in (tmp_path / "1").read_text()
    assert "stopped because rank 1 failed" in (tmp_path / "0").read_text()


@pytest.mark.thorough
def test_an_unreachable_rank_0_is_a_message_within_the_time_limit() -> None:
    lonely = ProcessEnv(1, 2, 0, 1, "node-b", "slurm", ("127.0.0.1", free_port()))
    text = r"rank 1 on node-b cannot meet the other ranks at 127.0.0.1:.* within 2 s .*\? .*[Cc]onnection refused"
    before = time.monotonic()
    with (
        pytest.raises(TrainingError, match=text),
        joined(lonely, CPU, identity(), sizes(2), {**TIMEOUTS, "startup": 2.0}),
    ):
        pass
    assert time.monotonic() - before < 3.0


def test_a_rank_waits_for_a_server_that_listens_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "_BETWEEN_ATTEMPTS", 0.01)
    port = free_port()
    with ExitStack() as stack:
        late = threading.Timer(0.2, lambda: stack.enter_context(socket.create_server(("127.0.0.1", port))))
        late.start()
        world_module._wait_for_server("127.0.0.1", port, time.monotonic() + 20)
        late.join()
    with pytest.raises(OSError, match="refused"):
        world_module._wait_for_server("127.0.0.1", port, time.monotonic() + 0.05)


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[torch.device]]:
    """Pretend that this machine has CUDA devices; returns those that were made current."""

    def pretend(count: int) -> list[torch.device]:
        chosen: list[torch.device] = []
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        return chosen

    return pretend


def test_each_local_rank_takes_its_device(accelerators: Callable[[int], list[torch.device]]) -> None:
    chosen = accelerators(4)
    assert device_of("auto", 2, 4) == torch.device("cuda:2") == chosen[0]
    assert device_of("cpu", 2, 4) == CPU


def test_a_process_that_sees_one_device_takes_it(accelerators: Callable[[int], list[torch.device]]) -> None:
    accelerators(1)
    assert device_of("cuda", 3, 4) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("count", "name", "text"),
    [
        (2, "cuda", "4 processes on this machine, but 2 cuda devices"),
        (4, "cuda:1", "'cuda:1' is a single device, but there are 4 processes; set device to 'cuda'"),
    ],
)
def test_devices_that_do_not_suffice_are_an_error(
    accelerators: Callable[[int], list[torch.device]], count: int, name: str, text: str
) -> None:
    accelerators(count)
    with pytest.raises(JobError, match=text):
        device_of(name, 3, 4)


def test_a_rendezvous_whose_name_does_not_resolve_is_an_error_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unknown(host: str, *_: Any, **__: Any) -> None:
        asked.append(host)
        if len(asked) < 3 or host == "never":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(world_module.socket, "getaddrinfo", unknown)
    here = ProcessEnv(1, 2, 0, 1, node="n2")
    monkeypatch.setattr(identity_module.time, "sleep", lambda _seconds: None)
    world_module._wait_for_name(here, "n1", 12_000, 60)  # a cluster publishes names with a delay
    assert asked == ["n1"] * 3
    with pytest.raises(
        JobError, match=r"rank 1 on n2 cannot resolve 'never'.*: Name or service not known; .*MASTER_ADDR"
    ):
        world_module._wait_for_name(here, "never", 12_000, 0)
