"""Inference runs with stand-ins of model, data and storage: shares of samples, progress, stops, and the summary."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import DataError, JobError, TrainingError
from d9d_inference import runner as module
from d9d_inference.compose import check_columns, check_data, weights_identity
from d9d_inference.part_store import Standing
from d9d_inference.runner import Inference, InferenceOutcome, total
from torch import Tensor, nn
from torch import distributed as dist


class Store:
    """Storage that knows the parts that were put, and notes what becomes of them."""

    def __init__(self, standing: Standing, late: int = 0) -> None:
        self.standing, self.late, self.output, self.directory = standing, late, "out.jsonl", "run"
        self.did: list[Any] = []
        self.put: dict[int, int] = {}
        self.looks = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.did.append("opened")
        try:
            yield
        finally:
            self.did.append("closed")

    def begin(self, record: object) -> Standing:
        self.did.append(("begin", record))
        return self.standing

    def has(self, part: int, count: int) -> bool:
        self.looks += 1
        return self.looks > self.late and self.put.get(part) == count

    def advance(self, end: int, samples: int, state: object) -> None:
        self.did.append(("advance", end, samples, state))

    def facts(self, _reached: int) -> list[tuple[int, Any]]:
        return [
            (start, SimpleNamespace(sums={"loss": float(count)}, rows=count))
            for start, count in sorted(self.put.items())
        ]

    def finish(self, reached: int, summary: Mapping[str, Any]) -> None:
        self.did.append(("finish", reached, summary))


class Prefetcher:
    """Packs by the number of their first sample; the state is that number."""

    def __init__(self, packs: Mapping[int, list[list[int]]], size: int) -> None:
        self.packs, self.size, self.at, self.closed = packs, size, 0, False

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def next(self) -> Any:
        self.at += self.size
        return [{"rows": torch.tensor(rows)} for rows in self.packs[self.at - self.size]]

    def state(self) -> int:
        return self.at

    def load_state(self, state: int) -> None:
        self.at = state


class Case:
    """An inference run over samples in packs of four, microbatches of two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, samples: int = 5, **given: Any) -> None:
        self.emitted: list[Any] = []
        self.notes: list[str] = []
        self.kept: list[tuple[int, int, list[list[int]]]] = []
        self.ran: list[list[list[int]]] = []
        self.phases: list[Any] = []
        self.rank, self.ranks = given.pop("rank", 0), given.pop("ranks", 1)
        self.tp = given.pop("tp", 0)
        self.store = Store(given.pop("standing", Standing(0, None, None)), given.pop("late", 0))
        self.facts: dict[str, Any] = {"samples": 6, "rows": 6, **given.pop("facts", {})}
        self.clock, self.minutes = iter(range(9)), iter(range(9))
        self.stop_after: int | None = given.pop("stop_after", None)
        packs = given.pop("packs", {0: [[0, 1], [2, 3]], 4: [[4, 5], [-1, -1]]})
        self.interrupts = SimpleNamespace(requested=None)
        owner = self

        class Interrupts:
            requested = None

            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...

        class Rows:
            def __init__(self, task: object, store: object, nonfinite: str) -> None:
                assert nonfinite == "error"

            def __enter__(self) -> Rows:
                return self

            def __exit__(self, *_: object) -> None: ...

            def put(self, kept: Any) -> None:
                rows = [one["rows"].tolist() for one in kept.microbatches]
                owner.kept.append((kept.first, kept.samples, rows))
                owner.store.put[kept.first] = kept.samples

            def drain(self) -> None:
                owner.store.did.append("drain")

        monkeypatch.setattr(module, "RowThread", Rows)
        monkeypatch.setattr(module, "time", SimpleNamespace(
            perf_counter=lambda: float(next(self.clock)) * 2, monotonic=lambda: float(next(self.minutes)) * 30,
            sleep=lambda _seconds: None,
        ))  # fmt: skip
        watchdog = SimpleNamespace(phase=lambda *phase: self.phases.append(phase))
        topology = SimpleNamespace(
            world=None, is_main=given.pop("is_main", True), data_parallel_rank=self.rank, data_parallel_size=self.ranks,
            coordinate={"tp": self.tp}, device=torch.device("cpu"), watchdog=watchdog,
        )  # fmt: skip
        job = SimpleNamespace(
            batch=SimpleNamespace(size=4), microbatch_size=2, deterministic=False, nonfinite="error"
        )  # fmt: skip
        task = SimpleNamespace(
            process=lambda outputs, _microbatch: {"score": outputs["score"]},
            finalize=lambda sums: {"mean": sums["loss"] / 5},
        )
        self.interrupting = Interrupts()
        arguments: dict[str, Any] = {
            "job": job, "topology": topology, "task": task, "forwards": SimpleNamespace(run=self.forward),
            "model": nn.Identity(), "least": 1, "prefetcher": Prefetcher(packs, 4), "samples": samples,
            "facts": self.facts, "store": self.store, "record": {"a": 1}, "interrupts": self.interrupting,
            "events": SimpleNamespace(emit=self.emit), "note": self.notes.append, **given,
        }  # fmt: skip
        self.inference = Inference(**arguments)

    def forward(self, pack: Sequence[Mapping[str, Tensor]], outputs: Callable[..., None]) -> None:
        self.ran.append([one["rows"].tolist() for one in pack])
        for one in pack:
            outputs({"score": one["rows"] * 10.0}, one)
        if self.stop_after == len(self.ran):
            self.interrupting.requested = cast("Any", "SIGTERM")

    def emit(self, event: object) -> None:
        self.emitted.append(event)

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.emitted]


def test_a_run_writes_all_rows_and_sums_up_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    outcome = case.inference.run()
    values = {"mean": 1.0, "seconds": 2.0, "rows_per_second": 2.5}
    assert outcome == InferenceOutcome("finished", 5, 5, values)
    # Sample 5 exists but is not wanted.
    assert case.ran == [[[0, 1], [2, 3]], [[4, -1]]]
    assert case.kept == [(0, 4, [[0, 1], [2, 3]]), (4, 1, [[4, -1]])]
    assert case.names == [
        "InferenceStarts", "PackStarts", "PackEnds", "RowsWritten", "PackStarts", "PackEnds", "RowsWritten",
        "InferenceFinished",
    ]  # fmt: skip
    assert [event.samples for event in case.emitted if isinstance(event, ev.RowsWritten)] == [4, 5]
    assert case.store.did == [
        "opened", ("begin", {"a": 1}), ("advance", 4, 5, 4), ("advance", 5, 5, 8), "drain",
        ("finish", 5, {"rows": 5, "samples": 5, "values": values}), "closed",
    ]  # fmt: skip
    assert case.phases == [("step", 0), ("step", 1), ("checkpoint",)]
    assert case.notes == []


def test_a_run_goes_on_after_the_samples_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, standing=Standing(4, cast("Any", 4), None))
    case.store.put[0] = 4
    outcome = case.inference.run()
    assert case.notes == ["continues after sample 4 of 5"]
    assert case.ran == [[[4, -1]]]
    # One of five samples in this start of two seconds, with a row for each.
    assert outcome.values["rows_per_second"] == 0.5


def test_a_finished_run_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"rows": 7, "values": {"mean": "0.5", "seconds": 1.0, "rows_per_second": 2.0}}
    case = Case(monkeypatch, standing=Standing(5, None, cast("Any", summary)))
    assert case.inference.run() == InferenceOutcome("finished", 5, 7, {"mean": 0.5})
    assert case.notes == ["nothing left to do: out.jsonl is complete"]
    assert (case.ran, case.emitted) == ([], [])


def test_a_stopped_run_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, stop_after=1)
    assert case.inference.run() == InferenceOutcome("stopped", 4, 0, {})
    assert case.notes == ["SIGTERM: stopped after sample 4 of 5; start again to continue"]
    assert case.names[-1] == "InferenceStopped"
    assert len(case.ran) == 1
    late = Case(monkeypatch, stop_after=2)  # asked in the last pack, after which nothing is left
    assert late.inference.run().status == "finished"


@pytest.mark.parametrize(
    ("rank", "kept"), [(0, [(0, 2, [[0, 1]]), (4, 1, [[4, -1]])]), (1, [(2, 2, [[2, 3]])])]
)  # fmt: skip
def test_data_parallel_ranks_have_their_share_of_each_pack(
    monkeypatch: pytest.MonkeyPatch, rank: int, kept: list[Any]
) -> None:
    packs = {0: [[0, 1]], 4: [[4, 5]]} if rank == 0 else {0: [[2, 3]], 4: [[-1, -1]]}
    case = Case(monkeypatch, rank=rank, ranks=2, packs=packs, is_main=False)
    case.inference.run()
    assert case.kept == kept
    assert len(case.ran) == 2  # also without real samples, as collectives must match


def test_ranks_along_tp_write_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, tp=1, is_main=False)
    case.store.put = {0: 4, 4: 1}
    case.inference.run()
    assert (case.kept, len(case.ran)) == ([], 2)


def test_a_schedule_gets_at_least_its_number_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, samples=6, least=2)
    case.inference.run()
    assert case.ran == [[[0, 1], [2, 3]], [[4, 5], [-1, -1]]]


@pytest.mark.parametrize(
    ("facts", "rows", "place", "wanted"),
    [
        ({"samples": 5}, [3, 9], 0, [3, 9]),  # all samples are wanted
        ({}, [3, 4, 5, -1], 0, [3, 4, -1, -1]),
        ({"rows": 12}, [8, 9, 10, 11], 0, [8, 9, -1, -1]),  # two rows a sample
        ({"packed": True}, [0, 7, 9], 3, [0, 7, -1]),  # by the place of the sample
    ],
)
def test_samples_beyond_the_wanted_number_become_fillers(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], rows: list[int], place: int, wanted: list[int]
) -> None:
    case = Case(monkeypatch, facts=facts)
    assert case.inference._wanted(torch.tensor(rows), place).tolist() == wanted


@pytest.mark.parametrize("asked", [False, True])
def test_ranks_stop_together_and_wait_for_each_other(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def all_reduce(flag: Tensor, operation: object, group: object) -> None:
        calls.append((flag.tolist(), operation, group))
        flag.fill_(asked)

    case = Case(monkeypatch)
    case.inference.topology.world = cast("Any", "world")
    monkeypatch.setattr(module, "on_main", lambda run, world: run() if world == "world" else None)
    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(module.dist, "barrier", calls.append)
    assert case.inference.run().status == ("stopped" if asked else "finished")
    assert calls == [([0.0], dist.ReduceOp.MAX, "world")] * (1 if asked else 2) + ["world"]
    assert case.notes == ["another rank: stopped after sample 0 of 5; start again to continue"] * asked


def test_rows_of_other_machines_are_waited_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, late=4)
    assert case.inference.run().samples == 5
    lost = Case(monkeypatch, late=1000)
    with pytest.raises(TrainingError, match="^run: rows written by other processes are not visible after 60 s; all"):
        lost.inference.run()
    assert lost.names[-1] == "InferenceFailed"
    assert lost.store.did[-1] == "closed"


def test_parts_of_samples_are_joined_before_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[list[float]] = []

    def join(found: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        joined.append(found["score"].tolist())
        return None if len(joined) == 1 else found

    case = Case(monkeypatch, parts=SimpleNamespace(join=join))
    case.store.put = {0: 4}
    case.inference.run()
    assert joined == [[0.0, 10.0], [20.0, 30.0], [40.0, -10.0]]
    assert case.kept == [(0, 4, [[2, 3]]), (4, 1, [[4, -1]])]


def test_a_failing_subscriber_to_a_failure_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(event: object) -> None:
        raise ValueError("second") if isinstance(event, ev.InferenceFailed) else KeyError("first")

    case = Case(monkeypatch, events=SimpleNamespace(emit=emit))
    with pytest.raises(KeyError, match="first") as caught:
        case.inference.run()
    assert caught.value.__notes__ == ["besides, a subscriber to InferenceFailed raised ValueError('second')"]


def test_tensors_of_a_gpu_are_copied_to_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    here = torch.ones(1)
    there: Any = SimpleNamespace(device=torch.device("cuda"), shape=(2, 3), dtype=torch.float16)
    pinned = SimpleNamespace(copy_=lambda tensor, non_blocking: asked.append((tensor is there, non_blocking)))
    monkeypatch.setattr(module.torch, "empty", lambda *given, **options: asked.append((given, options)) or pinned)
    assert module._to_host({"there": there, "here": here}) == {"there": pinned, "here": here}
    assert asked == [(((2, 3),), {"dtype": torch.float16, "pin_memory": True}), (True, True)]


def test_sums_are_rounded_once_and_keep_what_is_not_finite() -> None:
    assert total([1e16, 1.0, 1.0, -1e16]) == 2.0
    assert total(value for value in (math.inf, 1.0)) == math.inf
    assert math.isnan(total([math.nan, 1.0]))
    assert total([]) == 0.0


def data(**facts: Any) -> Any:
    return SimpleNamespace(facts={"rows": 9, "samples": 9, "sequence_length": 64, **facts})


def job_with(too_long: str = "error", limit: int | None = None) -> Any:
    return SimpleNamespace(data=SimpleNamespace(selector="docs"), too_long=too_long, limit=limit)


def test_data_is_read_in_one_pass_up_to_the_limit() -> None:
    assert check_data(data(), job_with()) == 9
    assert [check_data(data(), job_with(limit=limit)) for limit in (1, 9, 10)] == [1, 9, 9]
    assert check_data(data(cut_documents=2, dropped=3), job_with("cut")) == 9
    assert check_data(data(cut_documents=0, dropped=0), job_with()) == 9


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"rows": None}, "data: 'docs' cannot be read once and in order: it does not state its numbers of 'rows'"),
        ({"samples": None}, "data: 'docs' cannot be read once and in order: it does not state its numbers of 'rows'"),
        ({"samples": 0}, "data: there are no samples; give other sources, or another split"),
        ({"cut_documents": 1200}, "data.sequence_length: 1,200 rows are longer than 64 positions"),
        ({"dropped": 1}, "data: 1 records are dropped, as they are longer than 64 positions"),
    ],
)
def test_data_that_is_cut_or_cannot_be_read_once_is_refused(facts: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"^{problem}"):
        check_data(data(**facts), job_with())


def test_a_task_has_the_number_of_the_row_first() -> None:
    check_columns(cast("Any", SimpleNamespace(columns={"row": 1, "x": 2})))
    for columns in ({"x": 2, "row": 1}, {}):
        with pytest.raises(JobError, match="^task: columns of SimpleNamespace must begin with 'row', the row number"):
            check_columns(cast("Any", SimpleNamespace(columns=columns)))


def test_weights_are_recognised_by_names_sizes_and_times(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("abc")
    os.utime(file, (1, 1))
    first = weights_identity(str(tmp_path))
    assert first.startswith(f"{tmp_path} ")
    (tmp_path / "x.tmp").write_text("")
    assert weights_identity(str(tmp_path)) == first
    os.utime(file, (1, 2))
    second = weights_identity(str(tmp_path))
    file.write_text("abcd")
    os.utime(file, (1, 2))
    third = weights_identity(str(tmp_path))
    (tmp_path / "y").write_text("")
    assert len({first, second, third, weights_identity(str(tmp_path))}) == 4
