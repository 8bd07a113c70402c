"""Measured collectives: the process of a device, and the launch of all of them."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import TrainingError
from d9d_planner.links import measure, worker
from torch import distributed as dist


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_SIZES", {True: 1 << 10, False: 1 << 10})


@pytest.mark.usefixtures("small")
def test_a_process_measures_and_leaves_its_group(tmp_path: Path) -> None:
    worker.main(tmp_path, "cpu", 0, 1)
    found = json.loads((tmp_path / "rates.json").read_text())
    assert found["link"] == 0.0  # alone, it sends nothing
    assert 0 < found["link_latency"] < 1
    assert not dist.is_initialized()


@pytest.mark.usefixtures("small")
def test_only_the_first_process_writes_the_rates_and_a_failure_ends_the_group_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(worker.dist, "init_process_group", lambda *_, **given: ended.append(f"rank {given['rank']}"))
    monkeypatch.setattr(worker.dist, "destroy_process_group", lambda: ended.append("ended"))
    monkeypatch.setattr(worker, "rates", lambda _device, ranks: {"link": ranks})
    worker.main(tmp_path, "cpu", 1, 2)
    assert not (tmp_path / "rates.json").exists()
    worker.main(tmp_path, "cpu", 0, 2)
    assert json.loads((tmp_path / "rates.json").read_text()) == {"link": 2}

    def fails(*_: object) -> None:
        raise RuntimeError("no link")

    monkeypatch.setattr(worker, "rates", fails)
    with pytest.raises(RuntimeError, match="no link"):
        worker.main(tmp_path, "cpu", 0, 2)
    assert ended == ["rank 1", "ended", "rank 0", "ended", "rank 0", "ended"]


@pytest.mark.parametrize(("kind", "backend", "device"), [("cpu", "gloo", "cpu"), ("cuda", "nccl", "cuda:1")])
def test_each_process_has_a_device_and_meets_the_others_at_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, backend: str, device: str
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(worker.torch.accelerator, "set_device_index", lambda index: calls.append(("index", index)))
    monkeypatch.setattr(worker.dist, "init_process_group", lambda *named, **given: calls.append((named, given)))
    monkeypatch.setattr(worker.dist, "destroy_process_group", lambda: calls.append("left"))
    monkeypatch.setattr(worker, "rates", lambda *given: calls.append(given))
    worker.main(tmp_path, kind, 1, 4)
    meeting = {"init_method": (tmp_path / "meeting").as_uri(), "rank": 1, "world_size": 4}
    chosen = [] if kind == "cpu" else [("index", 1)]
    group = ((backend,), {**meeting, "timeout": timedelta(minutes=2)})
    assert calls == [*chosen, group, (torch.device(device), 4), "left"]


def test_rates_are_bytes_sent_by_a_rank_in_the_time_without_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[int]]] = []
    times = iter([3.0, 5.0, 1.0])

    def seconds(_device: object, run: Any) -> float:
        run()
        return next(times)

    monkeypatch.setattr(worker, "_SIZES", {True: 0, False: 1003})
    monkeypatch.setattr(worker, "_seconds", seconds)
    for name in ("all_gather_into_tensor", "all_reduce"):
        monkeypatch.setattr(
            worker.dist, name, lambda *tensors, name=name: asked.append((name, [one.numel() for one in tensors]))
        )
    found = worker.rates(torch.device("cpu"), 4)
    assert asked == [("all_gather_into_tensor", [1000, 250]), ("all_reduce", [1000]), ("all_reduce", [8])]
    assert found == {"link": 3 * 750 / 6.0, "link_latency": 1.0}
    times = iter([1.0, 1.0, 9.0])  # where latency is all there is, it is not taken off
    assert worker.rates(torch.device("cpu"), 4) == {"link": 3 * 750 / 0.02, "link_latency": 1.0}


def test_the_median_time_of_the_slowest_rank_counts_after_two_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [100.0, 100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 70.0]
    clock = iter([at for number, span in enumerate(spans) for at in (1000.0 * number, 1000.0 * number + span)])
    ran: list[str] = []
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(worker.dist, "barrier", lambda: ran.append("barrier"))
    monkeypatch.setattr(worker, "_wait", lambda device: ran.append(f"wait for {device}"))

    def slowest(tensor: torch.Tensor, operation: Any) -> None:
        assert operation == dist.ReduceOp.MAX
        tensor.add_(0.5)

    monkeypatch.setattr(worker.dist, "all_reduce", slowest)
    assert worker._seconds(torch.device("cpu"), lambda: ran.append("run")) == 4.5
    # The timer waits for work that was launched before the run, and by it.
    assert ran == ["barrier", "wait for cpu", "run", "wait for cpu"] * 9


def launched(monkeypatch: pytest.MonkeyPatch, program: str) -> dict[str, float]:
    """Rates from processes that run a program with their arguments."""
    monkeypatch.setattr(measure, "python_command", lambda: [sys.executable, "-S", "-c", program])
    return measure.measured_link("cpu", 2)


WRITES = """
import sys
directory, kind, rank, ranks = sys.argv[-4:]
if rank == "0":
    with open(directory + "/rates.json", "w") as file:
        file.write('{"link": %s}' % ranks)
"""


def test_processes_get_their_place_and_the_rates_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, WRITES) == {"link": 2}


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit(0 if sys.argv[-2] == '0' else 'first line\\nno port')", "process 1: no port; if this"),
        ("import sys; sys.exit(0 if sys.argv[-2] == '0' else 3)", "process 1: it printed nothing; if this"),
    ],
)
def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, program: str, said: str) -> None:
    with pytest.raises(TrainingError) as error:
        launched(monkeypatch, program)
    assert said in str(error.value)


def test_processes_that_never_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_PATIENCE", 0.05)
    began = time.monotonic()
    with pytest.raises(TrainingError, match="2 processes did not measure their collectives within 0 s"):
        launched(monkeypatch, "import time; time.sleep(60)")
    assert time.monotonic() - began < 50  # they were ended


@pytest.mark.parametrize(("ends", "gives_up"), [(180.0, False), (180.5, True)])
def test_processes_are_looked_at_twenty_times_a_second_for_three_minutes(
    monkeypatch: pytest.MonkeyPatch, ends: float, gives_up: bool
) -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += 60.0 if now[0] < 180.0 else 0.5

    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    slow = [SimpleNamespace(poll=lambda: 0), SimpleNamespace(poll=lambda: None if now[0] <= ends else 0)]
    with pytest.raises(TrainingError, match="within 180 s; check whether") if gives_up else nullcontext():
        measure._wait(slow)  # type: ignore[arg-type]
    assert set(pauses) == {0.05}
