"""Parts that observe a run alone: the logbook, skipped steps, curves, events, start-up, failures and stop requests."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import JobError, NonFiniteError
from d9d_core.events import StepResult
from d9d_core.metric import Table
from d9d_engine.costs import flops
from d9d_engine.launch import start, startup
from d9d_engine.launch.start import for_processes, option_words, process_of_launcher, start_up
from d9d_engine.launch.startup import StartUp
from d9d_engine.profiling import profiler
from d9d_engine.profiling.profiler import StepProfiler
from d9d_engine.profiling.summary import Span, table, time_by_kind
from d9d_engine.run.interrupt import Interrupts, Terminated
from d9d_engine.run.logbook import Logbook, Skips, is_state
from d9d_engine.sparklines import sparklines
from d9d_engine.subscribers.event_bus import Events
from d9d_engine.supervision.failure import ErrorFile, Failure, FailureReporter
from d9d_engine.trackers import utilisation
from d9d_engine.trackers.utilisation import Utilisation


def test_skipped_steps_are_counted_in_all_and_in_a_row() -> None:
    skips, seen = Skips(), []
    for step, finite in enumerate((True, False, False, True, False), 1):
        skips = skips.after(step, finite)
        seen.append((skips.total, skips.in_a_row, skips.first, skips.began, skips.kept_before))
    assert seen == [
        (0, 0, 0, 0, ()), (1, 1, 2, 2, (2,)), (2, 2, 2, 2, (2,)), (2, 0, 2, 0, (2,)), (3, 1, 2, 5, (2, 5)),
    ]  # fmt: skip
    assert Skips.of(skips.state()) == skips
    assert is_state(skips.state())
    for values in ({**skips.state(), "total": -1}, {**skips.state(), "total": True}, {**skips.state(), "more": 1}, 3):
        assert not is_state(values)


def result(
    loss: float = 2.0, norm: float = 1.0, tokens: float = 10.0, stop: bool = False, **terms: float
) -> StepResult:
    def tensor(value: float) -> torch.Tensor:
        return torch.tensor(value)

    finite = math.isfinite(loss) and math.isfinite(norm)
    named = {name: tensor(value) for name, value in terms.items()}
    return StepResult(tensor(loss), named, tensor(norm), torch.tensor(finite), tensor(tokens), torch.tensor(stop))


class Book:
    """A logbook and its entries."""

    def __init__(self, **given: Any) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.watched: list[tuple[int, float]] = []
        nonfinite = given.pop("nonfinite", "skip")
        self.book = Logbook(
            lambda step, values: self.written.append((step, dict(values))),
            lambda step, loss: self.watched.append((step, loss)),
            nonfinite,
            **given,
        )


def test_logged_steps_have_their_values_tokens_and_rate() -> None:
    made = Book(tokens=100, utilisation=lambda rate: {"mfu": rate / 100})
    made.book.record(1, result(), None)
    made.book.record(2, result(3.0, nll=1.0, z=2.0), {"lr": 0.5}, {"accuracy": torch.tensor(0.25)}, seconds=4.0)
    made.book.record(3, result(tokens=6.0, nll=1.0), {"lr": 0.25}, seconds=2.0)
    first = {
        "loss": 3.0, "grad_norm": 1.0, "loss/nll": 1.0, "loss/z": 2.0, "accuracy": 0.25, "tokens": 120.0, "lr": 0.5,
        "tokens_per_second": 5.0, "mfu": 0.05,
    }  # fmt: skip
    second = {
        "loss": 2.0, "grad_norm": 1.0, "tokens": 126.0, "lr": 0.25, "tokens_per_second": 3.0, "mfu": 0.03,
    }  # fmt: skip
    assert made.written == [(2, first), (3, second)]
    assert made.watched == [(1, 2.0), (2, 3.0), (3, 2.0)]
    assert (made.book.tokens, made.book.stop) == (126, False)
    made.book.record(4, result(stop=True), None)
    made.book.record(5, result(), None)
    assert made.book.stop is True


def test_skipped_steps_are_logged_with_their_number_and_too_many_in_a_row_are_an_error() -> None:
    made = Book(max_skipped=2)
    made.book.record(1, result(math.nan), {})
    made.book.record(2, result(), {})
    assert [(values["skipped_steps"], values["tokens"]) for _, values in made.written] == [(1.0, 10.0), (1.0, 20.0)]
    made.book.record(3, result(norm=math.inf), None)
    with pytest.raises(NonFiniteError) as caught:
        made.book.record(4, result(math.nan, math.inf), None)
    text = str(caught.value)
    assert text.startswith("step 4: loss is nan and grad_norm is inf; 2 steps in a row since step 3; weights are")
    assert "before step 3 was kept" in text
    with pytest.raises(NonFiniteError, match="^step 7: grad_norm is inf; this step changed nothing"):
        Book(nonfinite="error").book.record(7, result(norm=math.inf), None)


def test_tables_are_written_if_somebody_takes_them() -> None:
    tables: list[tuple[int, list[Any]]] = []
    load = {"a": Table(torch.tensor([[1.0, 2.0]])), "b": Table(torch.tensor([[3.0], [4.0]])), "x": torch.tensor(5.0)}

    def write(step: int, found: Mapping[str, Table]) -> None:
        tables.append((step, [(name, of.values.tolist()) for name, of in found.items()]))

    made = Book(write_tables=write)
    made.book.record(1, result(), {}, load)
    assert tables == [(1, [("a", [[1.0, 2.0]]), ("b", [[3.0], [4.0]])])]
    assert made.written[0][1]["x"] == 5.0
    made.book.record(2, result(), None, load)
    assert len(tables) == 1


def test_curves_share_their_axes() -> None:
    curves = {"a": [(0, 0.0), (3, 1.0)], "b": [(0, 0.5), (1, 0.5), (2, 0.25)], "c": [(0, math.nan)]}
    assert sparklines(curves, 4) == {"a": "▁▁▁█", "b": "▅▅▃", "c": ""}
    assert sparklines({"a": [(0, 0.0), (1, 7.0), (2, 8.0)]}, 2) == {"a": "▁█"}
    # Steps 0 to 4 of 4 in 4 cells: the last two share a cell, as the mean of 4 and 8.
    assert sparklines({"a": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0)]}, 4) == {"a": "▁▂▃▇"}
    assert sparklines({"a": [(2, 1.0), (4, 1.0)]}, 4) == {"a": "  ▁▁"}
    assert sparklines({"a": []}) == {"a": ""}


class Subscriber:
    def __init__(self, calls: list[str], name: str, fails: BaseException | None = None) -> None:
        self.calls, self.name, self.fails = calls, name, fails

    def subscriptions(self) -> Any:
        return [(ev.StepEnds, self._step)]

    def _step(self, _event: object) -> None:
        self.calls.append(self.name)
        if self.fails is not None:
            raise self.fails


STEP = ev.StepEnds(1, cast("Any", None))


def test_a_subscriber_that_raised_is_not_called_again() -> None:
    calls: list[str] = []
    bus = Events(
        [
            Subscriber(calls, "a", ValueError("first")),
            Subscriber(calls, "b", KeyError("second")),
            Subscriber(calls, "c"),
        ]
    )
    with pytest.raises(ValueError, match="first"):
        bus.emit(STEP)
    assert calls == ["a"]

    def block() -> None:
        with bus.deferring():
            bus.emit(STEP)
            bus.emit(STEP)
            calls.append("end of block")

    with pytest.raises(KeyError):
        block()
    assert calls == ["a", "b", "c", "c", "end of block"]
    assert bus.heard(ev.StepEnds)
    assert not bus.heard(ev.StepStarts)
    assert bus.heard(ev.StepStarts, ev.StepEnds)


def test_the_first_of_several_deferred_failures_is_raised_and_ctrl_c_at_once() -> None:
    calls: list[str] = []
    bus = Events([Subscriber(calls, "a", ValueError("first")), Subscriber(calls, "b", ValueError("second"))])
    with pytest.raises(ValueError, match="first"), bus.deferring():
        bus.emit(STEP)
    other = Events([Subscriber(calls, "a", ValueError("first")), Subscriber(calls, "b", KeyboardInterrupt("now"))])
    with pytest.raises(KeyboardInterrupt, match="now") as caught, other.deferring():
        other.emit(STEP)
    assert caught.value.__notes__ == ["besides, a subscriber had raised ValueError('first')"]


class Times:
    """Clocks of a start-up, which stand still between calls of ``pass_``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.cpu = 100.0, 3.0
        clocks = SimpleNamespace(monotonic=lambda: self.wall, process_time=lambda: self.cpu)
        monkeypatch.setattr(startup, "time", clocks)
        monkeypatch.setattr(startup, "_age", lambda: 2.0)
        monkeypatch.setattr(startup, "environment", lambda: {"python": "3"})

    def pass_(self, wall: float, cpu: float) -> None:
        self.wall, self.cpu = self.wall + wall, self.cpu + cpu


def test_a_start_up_is_told_phase_by_phase_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times, said = Times(monkeypatch), list[str]()
    with StartUp(said.append, shown=True, processes=2, command="d9d train a.yaml") as clock:
        handlers = dict(clock.subscriptions())
        times.pass_(1, 0.5)
        clock.ends("plugins", following="job")
        assert said == []  # an invalid job prints its error only
        times.pass_(4, 1)
        clock.ends("job", following="torch")
        assert said == ["start-up: plugins 3.0 s", "start-up: job 4.0 s"]
        handlers[ev.JobConfigured](SimpleNamespace(job=SimpleNamespace(run=SimpleNamespace(directory=tmp_path))))
        times.pass_(8, 2)
        handlers[ev.ModelPlanned](ev.ModelPlanned.__new__(ev.ModelPlanned))
        times.pass_(0.5, 0)
        handlers[ev.DataReady](ev.DataReady.__new__(ev.DataReady))
        times.pass_(16, 4)
        handlers[ev.StepEnds](STEP)
        handlers[ev.StepEnds](STEP)
        handlers[ev.PackEnds](STEP)
    assert said[2:] == [
        "start-up: plan 8.0 s",
        "ready after 31.5 s: plugins 3.0, job 4.0, plan 8.0, first step 16.0",
    ]  # fmt: skip
    record = json.loads((tmp_path / startup.FILE).read_text())
    assert (record["processes"], record["wall"], record["cpu"]) == (2, 31.5, 10.5)
    assert (record["environment"], record["command"]) == ({"python": "3"}, "d9d train a.yaml")
    assert record["phases"][0] == {"name": "plugins", "wall": 3.0, "cpu": 3.5}
    assert record["phases"][4] == {"name": "first step", "wall": 16.0, "cpu": 4.0}


def test_a_start_up_that_is_not_shown_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Times(monkeypatch)
    said: list[str] = []
    clock = StartUp(said.append, shown=False)
    clock._configured(cast("Any", SimpleNamespace(job=SimpleNamespace(run=SimpleNamespace(directory=tmp_path)))))
    clock._finish("first pack")
    assert (said, list(tmp_path.iterdir()), [phase.name for phase in clock.phases]) == ([], [], ["first pack"])


def test_an_interrupted_start_up_says_that_nothing_was_done() -> None:
    with (
        pytest.raises(KeyboardInterrupt, match="^during start-up; nothing was evaluated$"),
        start_up(nothing="evaluated"),
    ):
        raise KeyboardInterrupt
    with pytest.raises(Terminated, match="^SIGTERM$"), start_up():
        raise Terminated("SIGTERM")
    interrupts = Interrupts()
    interrupts.request("SIGHUP")
    with pytest.raises(Terminated, match="^SIGHUP$"), start_up(interrupts, alone=True):
        pass
    with start_up(interrupts, alone=False):
        pass


def test_options_of_a_command_are_repeated_for_launched_processes() -> None:
    words = option_words(["a=1", "b=2"], [Path("p.py")], True, True)
    assert words == ["--set", "a=1", "--set", "b=2", "--plugin", "p.py", "--no-plugins", "--strict-plugins"]
    assert option_words([], [], False, False) == []


def test_a_process_alone_forgets_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OTHER": "x"}
    assert process_of_launcher(dict(environ), alone=False).rank == 1
    assert process_of_launcher(environ, alone=True).rank == 0
    assert environ == {"OTHER": "x"}
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    with pytest.raises(JobError, match="MPI started this process as rank 1 of 2, but MASTER_ADDR"):
        process_of_launcher(mpi, alone=False)
    notes: list[str] = []
    monkeypatch.setattr(start, "print_note", notes.append)
    monkeypatch.setattr(start, "refuse_one_of_several_machines", lambda _environ, _words: "a warning")
    assert process_of_launcher({}, alone=False).world_size == 1
    process_of_launcher({}, alone=True)
    assert notes == ["a warning"]


class Loaded:
    """A job as loaded for a number of processes."""

    def __init__(self, processes: int | None, again: bool, auto: str | None, mesh: bool, calls: list[Any]) -> None:
        calls.append(("load", processes, again))
        self.calls, self.device = calls, "cpu"
        self.mesh = SimpleNamespace(world_size=3, tp=1)
        self.source = SimpleNamespace(auto=auto, document=SimpleNamespace(values={"mesh": {}} if mesh else {}))

    def check(self, processes: int) -> None:
        self.calls.append(("check", processes))


@pytest.mark.parametrize(
    ("nproc", "auto", "mesh", "devices", "calls"),
    [
        ("2", None, True, 4, [("load", 2, False), ("check", 2)]),
        (None, None, True, 4, [("load", 1, False), ("check", 3)]),
        (None, None, False, 4, [("load", 1, False), ("check", 3)]),
        ("auto", None, True, 4, [("load", 1, False), ("check", 3)]),
        ("auto", None, False, 4, [("load", 1, False), ("load", 4, True), ("check", 4)]),
        ("auto", None, False, 1, [("load", 1, False), ("check", 1)]),
        (None, "dp_shard", True, 4, [("load", 1, False), ("load", 4, True), ("check", 4)]),
    ],
)
def test_as_many_processes_start_as_are_given_or_the_mesh_or_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, nproc: str | None, auto: str | None, mesh: bool, devices: int, calls: list[Any]
) -> None:
    monkeypatch.setattr("d9d_engine.distributed.devices.count_devices", lambda _name: devices)
    found: list[Any] = []
    for_processes(lambda count, again: cast("Any", Loaded(count, again, auto, mesh, found)), nproc)
    assert found == calls


@pytest.mark.parametrize("nproc", ["0", "-1", "x", "1.5", ""])
def test_a_number_of_processes_is_a_number_or_auto(nproc: str) -> None:
    with pytest.raises(JobError, match=f"^--nproc: '{nproc}' is not a number of processes; give 1 or more, or auto$"):
        for_processes(cast("Any", None), nproc)


def test_one_process_is_a_number_of_processes() -> None:
    asked: list[tuple[int, bool]] = []

    def load(count: int, again: bool) -> Any:
        asked.append((count, again))
        raise KeyError("loaded")

    with pytest.raises(KeyError, match="loaded"):
        for_processes(load, "1")
    assert asked == [(1, False)]


class Ears:
    """Launcher that hears of a process's failure."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def failed(self, failure: Failure) -> None:
        self.heard.append(failure)

    def echoes(self, first: str) -> None:
        self.heard.append(first)


def test_a_failure_is_told_once_and_that_of_another_rank_only_to_the_launcher(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ears = Ears()
    reporter = FailureReporter("rank 0", ears)
    assert reporter.tell(Failure("mine"), lambda who: who) is True
    assert reporter.tell(Failure("again"), lambda who: who) is False
    assert ears.heard == [Failure("mine")]
    second, after = Ears(), Failure("broken pipe", second_hand=True)
    assert FailureReporter("rank 1", second).tell(after, lambda _who: "rank 0") is False
    assert second.heard == [after, "rank 0"]

    def gone(_who: str) -> str:
        raise RuntimeError("the store is gone")

    third = Ears()
    assert FailureReporter("rank 1", third).tell(after, gone) is False
    assert third.heard == [after, "another rank"]
    assert capsys.readouterr().err == ""
    assert FailureReporter("rank 1", None).tell(Failure("own\x1b[2J"), gone) is True
    assert capsys.readouterr().err == "own\\x1b[2J\n"
    assert FailureReporter("rank 1", None).tell(after, gone) is False
    assert capsys.readouterr().err == ""


def test_a_failure_looks_second_hand_if_a_connection_broke() -> None:
    for error, second in (
        (RuntimeError("Connection closed by peer"), True), (OSError("Broken pipe"), True), (RuntimeError("x"), False),
        (ValueError("connection reset"), False),
    ):  # fmt: skip
        assert Failure.of(error).second_hand is second
    assert Failure.of(JobError("bad job")) == Failure("error: bad job", 2)
    assert Failure.of(ValueError("x"), "rank 1").text == "rank 1 failed:\nValueError: x"


def test_the_file_for_an_agent_has_the_headline_and_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_engine.supervision.failure.time", SimpleNamespace(time=lambda: 50.9))
    file = ErrorFile(tmp_path / "error.json")
    file.failed(Failure("Traceback\n  line\nValueError: x\n"))
    first = json.loads(file.path.read_text())["message"]
    assert first == {
        "message": "ValueError: x",
        "extraInfo": {"py_callstack": "Traceback\n  line\nValueError: x\n", "timestamp": "50"},
    }
    file.echoes("rank 1")
    second = json.loads(file.path.read_text())["message"]
    assert (second["message"], second["extraInfo"]["timestamp"]) == ("stopped because rank 1 failed", "51")


def test_a_request_in_a_step_of_several_is_kept_for_the_next_block() -> None:
    interrupts, entered = Interrupts(), list[str]()
    interrupts.entered = lambda: entered.append("entered")
    with interrupts.kept():
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.requested == "SIGTERM"
    assert interrupts.requested == "SIGTERM"
    with interrupts:
        interrupts.request("SIGHUP")
        assert interrupts.requested == "SIGTERM"
    assert (interrupts.requested, entered) == (None, ["entered", "entered"])


class Config(SimpleNamespace):
    every, warmup, active, memory, record_shapes, with_stack = 10, 2, 3, False, False, False


def test_the_profiler_warns_if_the_run_ends_before_its_next_window() -> None:
    def warned(step: int, total: int) -> list[str]:
        notes: list[str] = []
        topology: Any = SimpleNamespace()
        StepProfiler(cast("Any", Config()), topology, Path(), notes.append, cast("Any", None)).check(step, total)
        return notes

    # Steps 6 and 7 of each cycle of 10 warm up, and 8 to 10 are recorded.
    assert warned(0, 8) == []
    told = "nothing will be recorded: the next recorded step is 8 of 7; lower profiling.every, which is 10"
    assert warned(0, 7) == [f"warning: profiling: {told}"]
    assert warned(5, 8) == []
    assert len(warned(6, 17)) == 1
    assert warned(6, 18) == []
    assert warned(7, 7) == []
    actions = [profiler._action(2, 3, number).name for number in range(6)]
    assert actions == ["WARMUP", "WARMUP", "RECORD", "RECORD", "RECORD_AND_SAVE", "NONE"]


def test_the_time_of_steps_is_split_by_kind_once() -> None:
    spans = [
        Span("ProfilerStep#1", 0, 100), Span("aten::mm", 10, 30), Span("nccl:all_reduce", 20, 50),
        Span("aten::add", 60, 70),
        Span("ProfilerStep#2", 100, 200), Span("d9d/optimizer", 150, 170, is_range=True), Span("aten::mm", 160, 180),
        Span("ProfilerStep#3", 200, 300), Span("aten::mm", 210, 220),
    ]  # fmt: skip
    times, total = time_by_kind(spans, 2)
    assert total == 200
    assert times == {
        "optimizer": 20, "attention": 0.0, "matmul": 20 + 10, "other": 10, "communication": 20, "idle": 120,
    }  # fmt: skip
    lines = table(
        {"matmul": 3000.0, "attention": 0, "other": 0, "communication": 0, "optimizer": 0, "idle": 1000.0},
        4000.0,
        2,
        "x",
    )
    assert lines.splitlines()[:2] == ["x: 2.00 ms per step", "  matmul                       1.50 ms   75.0%"]
    assert lines.splitlines()[-1] == "  idle                         0.50 ms   25.0%"


def test_utilisation_is_of_all_devices_and_memory_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(utilisation, "resident_bytes", lambda: 3 << 30)
    assert Utilisation(cpu, 2, 1e9, 10.0)(4000.0) == {"mfu": 0.2}
    assert Utilisation(cpu, 2, 1e9, 10.0, memory=True)(4000.0) == {"mfu": 0.2, "memory/resident_gib": 3.0}
    assert Utilisation(cpu, 2, None, 10.0)(1.0) == Utilisation(cpu, 2, 1e9)(1.0) == {}
    monkeypatch.setattr(utilisation, "resident_bytes", lambda: None)
    assert Utilisation(cpu, 2, None, memory=True)(1.0) == {}


def test_resident_memory_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "status"
    monkeypatch.setattr(utilisation, "_STATUS", file)
    assert utilisation.resident_bytes() is None
    file.write_text("VmPeak:\t 9 kB\nVmHWM:\t 5 kB\n")
    assert utilisation.resident_bytes() == 5 * 1024
    file.write_text("VmPeak:\t 9 kB\n")
    assert utilisation.resident_bytes() is None


def test_flops_count_two_products_for_the_backward_of_attention() -> None:
    def op(kind: str, forward: float, backward: float) -> Any:
        return SimpleNamespace(kind=kind, flops=forward, backward_flops=backward)

    blocks = [SimpleNamespace(count=3, ops=[op("product", 1, 2), op("attention", 10, 25), op("attention", 100, 0)])]
    assert flops._flops(cast("Any", [SimpleNamespace(blocks=blocks)] * 2)) == 2 * 3 * (3 + 30 + 100)


def test_early_stopping_keeps_its_count_only_with_the_same_series_and_whole_numbers() -> None:
    from d9d_engine.subscribers.config import EarlyStoppingConfig
    from d9d_engine.subscribers.early_stopping import EarlyStopping

    good = {"series": "eval/loss", "mode": "min", "best": 2.0, "since": 2}
    start = {"series": "eval/loss", "mode": "min", "best": None, "since": 0}
    for changes, kept in (
        ({}, True), ({"best": None}, True), ({"series": "loss"}, False), ({"mode": "max"}, False),
        ({"best": 2}, False), ({"best": "x"}, False), ({"since": "2"}, False), ({"since": None}, False),
    ):  # fmt: skip
        stopping = EarlyStopping(EarlyStoppingConfig(series="eval/loss"))
        stopping.load_state({**good, **changes})
        assert stopping.state() == ({**good, **changes} if kept else start)


def test_processes_of_several_machines_are_loaded_together() -> None:
    found: list[Any] = []
    job: Any = SimpleNamespace(check=found.append, mesh=SimpleNamespace(world_size=12, tp=4))
    assert for_processes(lambda count, again: found.append((count, again)) or job, "4", 3) is job
    assert found == [(12, False), 12]
    with pytest.raises(JobError, match="--nproc N"):
        for_processes(cast("Any", None), "auto", 3)
