"""Waits of ranks for each other, their failure reports and the receivers, and times of saves. Clocks are stand-ins."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError, PluginError, SaveError, TrainingError
from d9d_core.events import SaveReport
from d9d_core.registry.manifest import Manifest
from d9d_engine.checkpoint import save as dcp_save
from d9d_engine.checkpoint import save_job
from d9d_engine.checkpoint.background import Background
from d9d_engine.checkpoint.retention import BestOf, Retention
from d9d_engine.checkpoint.save_job import SaveJob
from d9d_engine.compose.export import _names_of_classes, end_of_text
from d9d_engine.launch.process import Process
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.prefetch import _Transferred
from d9d_engine.supervision import failure as failure_module
from d9d_engine.supervision import identity as module
from d9d_engine.supervision.failure import ErrorFile, Failure, FailureReporter
from d9d_engine.supervision.identity import Identity, agree, wait_until
from torch import distributed as dist

MINE = Identity({"python": "3"}, {}, {"steps": "1"})


class Clock:
    """Clock that only a sleep moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


# --- waits


@pytest.mark.parametrize(("after", "found", "sleeps"), [(0, True, 0), (3, True, 3), (5, True, 5), (6, False, 5)])
def test_a_condition_is_tested_until_after_the_limit(
    monkeypatch: pytest.MonkeyPatch, after: int, found: bool, sleeps: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    # With a limit of 2 s and pauses of half a second, the tests are at 0, 0.5, ... 2 and 2.5 s.
    assert wait_until(lambda: len(clock.slept) >= after, 2.0, 0.5) is found
    assert clock.slept == [0.5] * sleeps


@pytest.mark.parametrize(
    ("rank", "size", "timeout", "waits", "pause"),
    [(0, 2, 10.0, 10.0, 0.02), (1, 2, 10.0, 20.0, 0.02), (1, 400, 30.0, 60.0, 0.02), (1, 1000, 600.0, 630.0, 0.05)],
)
def test_other_ranks_wait_longer_than_rank_0_which_names_the_missing_ones(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, timeout: float, waits: float, pause: float
) -> None:
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(module, "wait_until", lambda _true, limit, every: asked.append((limit, every)))
    store = dist.HashStore()  # type: ignore[attr-defined]
    text = f"rank {size - 1} of {size} did not arrive within 10 s" if rank == 0 else "rank 0 did not arrive within"
    with pytest.raises(TrainingError, match=text):
        agree(store, ProcessEnv(rank, size, rank, size, "here", "slurm"), MINE, timeout)
    assert asked[0] == (waits, pause)
    assert asked[1:] == ([(5, pause)] if rank == 0 else [])


def test_differences_of_identities_are_in_order_and_short() -> None:
    job = {"plugins": {"files": ["x"]}, "a": {"b": [1, {"c": None}], "d": {}}, "e": [], "f": "y" * 60, "g": "z" * 58}
    one = Identity.of(Manifest({}), job)
    assert one.job == {
        "a.b[0]": "1", "a.b[1].c": "null", "a.d": "{}", "e": "[]", "f": json.dumps("y" * 60), "g": json.dumps("z" * 58),
    }  # fmt: skip
    assert one.software.keys() == {"python", "torch", "d9d-core", "d9d-weights"}
    assert Identity.loads(one.dumps().encode()) == one
    other = Identity({**one.software, "torch": "0"}, {}, {"a.b[0]": "2"})
    changed = [text.partition(": ")[2] for _, text in one.differences(other, "here", "there")]
    assert changed == [f"torch: here {one.software['torch']}, there 0"]
    other = Identity(one.software, {}, {"a.b[0]": "2"})
    assert [text.partition(": ")[2] for _, text in one.differences(other, "here", "there")] == [
        "a.b[0]: here 1, there 2", "a.b[1].c: here null, there unset", "a.d: here {}, there unset",
        "e: here [], there unset", f'f: here "{"y" * 56}..., there unset', f'g: here "{"z" * 58}", there unset',
    ]  # fmt: skip


# --- reports


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def failed(self, failure: Failure) -> None:
        self.heard.append(failure)

    def echoes(self, first: str) -> None:
        self.heard.append(first)


ENV = ProcessEnv(1, 2, 1, 2, "host", "torchrun")


def test_a_process_reports_its_failure_once_with_the_best_name(capsys: pytest.CaptureFixture[str]) -> None:
    listener = Listener()
    made = Process(ENV, listener, repeats=True)
    with pytest.raises(SystemExit) as end:
        made.fail(PluginError("no plugin"))
    assert (end.value.code, listener.heard) == (2, [Failure("error: no plugin", 2)])
    reporter = made.reporter("rank 1 (tp=1)")
    with pytest.raises(SystemExit):
        made.fail(ValueError("mine"))
    assert [failure.text.splitlines()[0] for failure in listener.heard[1:]] == ["rank 1 (tp=1) on host failed:"]
    assert reporter.told
    with pytest.raises(SystemExit):
        made.fail(ValueError("a consequence"))
    assert len(listener.heard) == 2
    assert capsys.readouterr().err == ""


def test_a_rank_that_was_not_the_first_says_who_was(capsys: pytest.CaptureFixture[str]) -> None:
    listener, failure = Listener(), Failure("text")
    assert not FailureReporter("rank 1", listener).tell(failure, lambda _who: "rank 0")
    assert listener.heard == [failure, "rank 0"]
    assert not FailureReporter("rank 1", None).tell(failure, lambda _who: "rank 0")
    assert capsys.readouterr().err == ""
    reporter = FailureReporter("rank 1", None)
    assert reporter.tell(failure, lambda who: who)
    assert not reporter.tell(Failure("later"), lambda who: who)
    assert capsys.readouterr().err == "text\n"


@pytest.mark.parametrize(("second_hand", "told"), [(True, False), (False, True)])
def test_without_a_store_a_broken_connection_is_another_ranks_failure(
    capsys: pytest.CaptureFixture[str], second_hand: bool, told: bool
) -> None:
    def gone(_who: str) -> str:
        raise RuntimeError("the store is gone")

    assert FailureReporter("rank 1", None).tell(Failure("text", second_hand=second_hand), gone) is told
    assert capsys.readouterr().err == ("text\n" if told else "")


@pytest.mark.parametrize(
    ("error", "second_hand"),
    [
        (RuntimeError("Connection closed by peer"), True),
        (ConnectionResetError("Broken pipe"), True),
        (RuntimeError("NCCL error"), True),
        (RuntimeError("out of memory"), False),
        (ValueError("timed out"), False),
    ],
)
def test_only_broken_connections_look_like_a_consequence(error: Exception, second_hand: bool) -> None:
    assert Failure.of(error) == Failure(_line(error), 1, second_hand)
    headline, said = Failure.of(error, "rank 3 on host").text.splitlines()
    assert said == _line(error)
    assert headline.startswith("rank 3 on host lost its connection" if second_hand else "rank 3 on host failed:")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def test_frames_of_hidden_files_are_left_out_at_the_begin_only() -> None:
    def outer() -> None:
        json.loads("{")

    try:
        outer()
    except ValueError as error:
        caught = error
    whole = Failure.of(caught).text
    assert "in outer" in whole
    hidden = Failure.of(caught, hide={__file__}).text
    assert "in outer" not in hidden
    assert "in loads" in hidden
    assert "in outer" in Failure.of(caught, hide={json.__file__}).text


def test_an_error_file_of_a_consequence_is_later_than_that_of_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(failure_module, "time", SimpleNamespace(time=lambda: 50.7))
    file = ErrorFile(tmp_path / "error")
    file.failed(Failure("first\n  last line\n"))
    assert json.loads(file.path.read_text()) == {
        "message": {"message": "  last line", "extraInfo": {"py_callstack": "first\n  last line\n", "timestamp": "50"}}
    }
    file.echoes("rank 0")
    told = json.loads(file.path.read_text())["message"]
    assert (told["message"], told["extraInfo"]["timestamp"]) == ("stopped because rank 0 failed", "51")


# --- saves


class Draft:
    def __init__(self) -> None:
        self.discarded = 0

    def discard(self) -> None:
        self.discarded += 1


def saved(
    monkeypatch: pytest.MonkeyPatch, rank: int = 0, stall: float | None = None, fails: Exception | None = None
) -> tuple[Any, Draft, list[Any]]:
    """Report of a save whose clock moves by 8 s, its draft, and the names of pruned checkpoints."""
    times, draft, pruned = iter([100.0, 108.0]), Draft(), list[Any]()

    def save(*_given: Any) -> int:
        if fails is not None:
            raise fails
        return 77

    monkeypatch.setattr(save_job, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(dcp_save, "CheckpointWriter", lambda *given: given)
    monkeypatch.setattr(dcp_save, "ShardPlanner", lambda ready: ready)
    monkeypatch.setattr(dcp_save, "save", save)
    storage: Any = SimpleNamespace(draft=lambda _name: draft, location=lambda name: f"runs/{name}")
    pruner: Any = SimpleNamespace(prune=lambda *given: pruned.append(given) or "a warning")
    job = SaveJob(storage, "step-3", 3, lambda: b"", {}, rank, None, pruner, (2,))
    return job.run(dict, stall), draft, pruned


def test_a_save_reports_its_seconds_and_prunes_on_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    report, draft, pruned = saved(monkeypatch)
    assert report == SaveReport(3, "runs/step-3", 8.0, 8.0, 77, "a warning")
    assert (pruned, draft.discarded) == ([(3, (2,))], 0)
    report, _, pruned = saved(monkeypatch, rank=1, stall=0.25)
    assert (report, pruned) == (SaveReport(3, "runs/step-3", 0.25, 8.0, 77, None), [])


@pytest.mark.parametrize(("error", "kind"), [(OSError("no room"), SaveError), (ValueError("odd"), CheckpointError)])
def test_a_failed_save_names_the_cause_and_leaves_no_draft(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    drafts: list[Draft] = []
    monkeypatch.setattr(Draft, "__init__", lambda draft: (drafts.append(draft), setattr(draft, "discarded", 0))[1])
    with pytest.raises(
        CheckpointError, match="^checkpoint runs/step-3 could not be written: .*; earlier checkpoints"
    ) as caught:
        saved(monkeypatch, fails=error)
    assert type(caught.value) is kind
    assert drafts[0].discarded == 1


def test_the_last_checkpoint_before_a_step_is_kept() -> None:
    assert Retention(1).surplus([2, 4, 6, 8, 10], {}, 10, [7, 4]) == [4, 8]
    assert Retention(1).surplus([2, 4], {}, 4, [2]) == [2]
    assert Retention(2, every=4).surplus([2, 4, 6, 8, 10], {}, 10) == [2, 6]
    scores = {2: 1.0, 4: 3.0, 6: 1.0, 8: 2.0}
    assert Retention(1, best=BestOf("x", "min", 1)).surplus([2, 4, 6, 8, 10], scores, 10) == [4, 6, 8]
    assert Retention(1, best=BestOf("x", "max", 2)).surplus([2, 4, 6, 8, 10], scores, 10) == [2, 6]
    assert Retention(None).surplus([2, 4], {}, 4) == []


# --- exports and packs


def test_stop_tokens_of_the_data_are_appended_to_those_of_the_model() -> None:
    def changed(before: Any, **facts: Any) -> Any:
        return end_of_text({} if before is None else {"eos_token_id": before}, facts).get("eos_token_id")

    assert changed(7, stop_token_ids=[9, 7]) == [7, 9]
    assert changed([7, 8], stop_token_ids=[8]) is None
    assert changed(None, eos_token_id=5) == 5
    assert changed(None, eos_token_id=5, stop_token_ids=[5, 6]) == [5, 6]
    assert changed(7, eos_token_id=5) is None
    assert changed(None) is None
    assert changed([7]) == 7


def test_labels_of_the_data_name_the_classes_of_a_model_with_as_many() -> None:
    config = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    assert _names_of_classes(config, {"labels": ["bad", "good"]}) == {
        "id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1},
    }  # fmt: skip
    assert _names_of_classes(config, {"labels": ["bad", "good", "odd"]}) == {}
    assert _names_of_classes(config, {"labels": "no list"}) == {}
    assert _names_of_classes({}, {"labels": ["bad", "good"]}) == {}


def test_a_pack_of_another_stream_is_awaited_and_its_memory_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []
    current = SimpleNamespace(wait_event=lambda event: did.append(("waits", event)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: did.append(device) or current)
    tensors: Any = [SimpleNamespace(record_stream=lambda stream: did.append(stream is current)) for _ in range(2)]
    pack: Any = [{"x": tensors[0]}, {"x": tensors[1]}]
    event: Any = "an event"
    device = torch.device("cuda", 1)
    assert _Transferred(pack, device, event).receive() is pack
    assert did == [device, ("waits", event), True, True]
    did.clear()
    assert _Transferred(pack).receive() is pack
    assert did == []


def test_work_in_the_background_neither_keeps_the_process_alive_nor_hides_its_error() -> None:
    gate = threading.Event()
    slow = Background(lambda: gate.wait(60), "the work")
    assert (slow._thread.daemon, slow._thread.name) == (True, "the work")
    assert (slow.wait(0.0), slow.done, slow.failed) == (False, False, False)
    gate.set()
    assert (slow.result(), slow.wait(60), slow.failed) == (True, True, False)
    broken = Background(lambda: 1 // 0, "broken")
    assert (broken.wait(60), broken.failed) == (True, True)
    with pytest.raises(ZeroDivisionError):
        broken.result()
