"""Refusals and skips of the conformance suites, with stand-ins for their subjects: no processes, no training."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import LaunchError
from d9d_core.plugin import Spec
from d9d_testing import collectives
from d9d_testing.stand_ins import StandIns
from d9d_testing.suites import fresh
from d9d_testing.suites import launcher as launcher_suite
from d9d_testing.suites import model as model_suite
from d9d_testing.suites import peft as peft_suite
from d9d_testing.suites import plugin as plugin_suite
from d9d_testing.suites import subscriber as subscriber_suite
from d9d_testing.suites import tracker as tracker_suite
from d9d_testing.suites.dataset import DatasetSuite
from d9d_testing.suites.inference.task import InferenceTaskSuite
from d9d_testing.suites.launcher import LauncherSuite, Started
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.peft import PeftSuite
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.schedule import ScheduleSuite
from d9d_testing.suites.strategy import StrategySuite
from d9d_testing.suites.subscriber import SubscriberSuite
from d9d_testing.suites.support import model_matrices
from d9d_testing.suites.support.component import registry_of
from d9d_testing.suites.support.models import require
from d9d_testing.suites.support.ops import KNOWN_OPS
from d9d_testing.suites.task import TaskSuite
from d9d_testing.suites.tracker import TrackerSuite
from d9d_testing.world import wire, worker
from torch import nn


def skipped(reason: str) -> Any:
    return pytest.raises(pytest.skip.Exception, match=reason)


# --- trackers


class Memory(TrackerSuite):
    """Suite of a tracker that keeps its values; a resumed run drops the values after its step, or writes on."""

    kept: Mapping[int, Any]

    def build(self, **_: Any) -> Any:
        return None

    def opened(self, directory: Path, resumed_step: int = 0, state: Any = None) -> Any:
        values = self.values
        if self.rewinds:
            for step in [step for step in values if step > resumed_step]:
                del values[step]
        return SimpleNamespace(
            write=values.__setitem__, flush=lambda: None, state=lambda: {"id": 1},
            close=lambda _status: None,
        )  # fmt: skip

    def crash(self, run: Any) -> None:
        pass

    def logged(self, directory: Path) -> Any:
        return self.lost(dict(self.values))

    def __init__(self, rewinds: bool, lost: Any = lambda logged: logged) -> None:
        self.values: dict[int, Any] = {}
        self.lost = lost
        type(self).rewinds = rewinds


def without(*steps: int) -> Any:
    return lambda logged: {step: values for step, values in logged.items() if step not in steps}


@pytest.mark.parametrize(
    ("rewinds", "lost", "says"),
    [
        (True, without(), None), (False, without(), None), (False, without(6), None),
        (False, without(4), "resumed, logged are"), (False, without(1), "resumed, logged are"),
        (False, without(5), "resumed at step 4 and written after step 5, logged are"),
        (False, lambda logged: logged | {7: {}}, "logged are steps that were never written"),
        (False, lambda logged: logged | {0: {}}, "logged are steps that were never written"),
        (True, without(4), "resumed at step 4, logged are"), (True, lambda logged: logged | {6: {}}, "remove entries"),
        (True, lambda logged: logged | {5: {"loss": 1.0}}, "expected .*5: {'loss': 2.0}"),
    ],
)  # fmt: skip
def test_a_resumed_tracker_has_the_steps_before_the_checkpoint_and_the_repeated_one(
    rewinds: bool, lost: Any, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_suite, "_bury", lambda _run: None)
    suite = Memory(rewinds, lost)
    if says is None:
        suite.test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path)
    else:
        with pytest.raises(AssertionError, match=says):
            suite.test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path)


def test_a_resumed_tracker_that_cannot_be_read_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_suite, "_bury", lambda _run: None)
    with skipped("Memory.logged does not say how to read back what was logged"):
        Memory(True, lambda _logged: None).test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path)


class Killed(TrackerSuite):
    """Suite of a tracker whose process is killed by a stand-in."""

    flushed: Any = None
    reports = True

    def address(self) -> Any:
        return "tracker", "plugin", "target", {"a": 1}

    def opened(self, directory: Path, resumed_step: int = 0, state: Any = None) -> Any:
        assert (directory.name, resumed_step, state) == ("run", 3, {"id": 1})
        return SimpleNamespace(write=lambda *given: self.written.append(given), close=lambda _status: None)

    def read(self, directory: Path) -> Any:
        return self.found | dict(self.written)

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.found: dict[int, Any] = {step: {"loss": float(step)} for step in (1, 2, 3)}


def killed(suite: Killed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        def __init__(self, size: int) -> None:
            assert size == 1

        def run(self, _function: Any, address: Any, directory: str, steps: Any) -> None:
            assert (address[3], steps) == ({"a": 1, **suite.fields(Path(directory))}, [1, 2, 3])
            if suite.reports:
                report = {"flushed": suite.flushed, "state": {"id": 1}}
                (Path(directory) / tracker_suite.REPORT).write_text(json.dumps(report))

    monkeypatch.setattr(tracker_suite, "World", World)
    suite.test_a_killed_process_loses_nothing_that_was_flushed(tmp_path)


def test_values_that_were_flushed_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(Killed(), tmp_path, monkeypatch)
    assert not (tmp_path / "run" / tracker_suite.REPORT).exists()
    for number, (faults, says) in enumerate([
        ({"found": {1: {"loss": 1.0}}}, "after a kill behind flush.., and a resumed run that writes step 4"),
        ({"reports": False}, "the process was killed before flush.. and state.. returned"),
    ]):  # fmt: skip
        suite = Killed()
        vars(suite).update(faults)
        (tmp_path / str(number)).mkdir()
        with pytest.raises(AssertionError, match=says):
            killed(suite, tmp_path / str(number), monkeypatch)
    later = tmp_path / "later"
    later.mkdir()
    suite = Killed()
    suite.flushed = False
    with skipped("flush.. returns False, so the checkpoint keeps the values"):
        killed(suite, later, monkeypatch)
    with skipped("Memory overrides build.., so another process cannot build the tracker"):
        Memory(True).test_a_killed_process_loses_nothing_that_was_flushed(tmp_path)
    suite.dies_in_process = False  # type: ignore[misc]
    with skipped("Killed.dies_in_process is False"):
        suite.test_a_killed_process_loses_nothing_that_was_flushed(tmp_path)


@pytest.mark.parametrize("found", [{1: {"loss": 1.0}}, {}])
def test_a_flushed_value_is_found_by_a_reader(found: dict[int, Any], tmp_path: Path) -> None:
    happened: list[Any] = []
    suite = Killed()
    suite.found = found
    run = SimpleNamespace(
        write=lambda *given: happened.append(given), flush=lambda: happened.append("flush"), close=happened.append
    )
    suite.opened = lambda _directory: run  # type: ignore[method-assign]
    if found:
        suite.test_a_flush_keeps_what_was_written(tmp_path)
    else:
        with pytest.raises(AssertionError, match="after flush.., logged are {}; write out buffers"):
            suite.test_a_flush_keeps_what_was_written(tmp_path)
    assert happened == [(1, {"loss": 1.0}), "flush", "finished"]


# --- subscribers


class Watching(SubscriberSuite):
    """Suite of a subscriber with given subscriptions."""

    pairs: Any = ()

    def build(self, **_: Any) -> Any:
        return self

    def watching(self, _directory: Path) -> Any:
        return SimpleNamespace(subscriptions=lambda: self.pairs)


def test_subscriptions_are_events_and_functions_of_one_argument(tmp_path: Path) -> None:
    for pairs, says in (
        ([(ev.StepEnds, lambda event: None)], None), ([], "subscriptions.. is empty; yield pairs of an event"),
        ([(int, print)], "subscribes to <class 'int'>, which is not an event; events are: "),
        ([(ev.StepEnds, 3)], "the handler of StepEnds is 3; give a function"),
        ([(ev.StepEnds, lambda: None)], "the handler of StepEnds must take the event only"),
        ([(ev.StepEnds, lambda event, more: None)], "the handler of StepEnds must take the event only"),
    ):  # fmt: skip
        suite = Watching()
        suite.pairs = pairs
        if says is None:
            suite.test_it_subscribes_to_events_that_exist(tmp_path)
        else:
            with pytest.raises(AssertionError, match=says):
                suite.test_it_subscribes_to_events_that_exist(tmp_path)


def test_handlers_that_break_have_to_end_the_run(tmp_path: Path) -> None:
    suite = Watching()
    ran: list[str] = []

    def trained(directory: Path, _subscribers: Any) -> None:
        ran.append(directory.name)
        if len(ran) == 1:
            raise KeyError

    suite.trained = trained  # type: ignore[method-assign, assignment]
    suite.broken_fields = lambda _directory: {"a": 1}  # type: ignore[method-assign]
    suite.test_what_it_raises_ends_the_run(tmp_path)
    with pytest.raises(
        AssertionError, match="with {'a': 1} the run succeeds; handlers must not catch their exceptions"
    ):
        suite.test_what_it_raises_ends_the_run(tmp_path)
    assert ran == ["run", "run"]
    suite.broken_fields = lambda _directory: None  # type: ignore[method-assign]
    with skipped("Watching.broken_fields returns no fields with which a handler fails"):
        suite.test_what_it_raises_ends_the_run(tmp_path)


def test_reads_of_handlers_are_counted_by_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    class Reads:
        def __enter__(self) -> Any:
            found.clear()
            self.found = found
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(subscriber_suite, "HostReads", Reads)
    inner = SimpleNamespace(
        subscriptions=lambda: [(ev.StepEnds, lambda _: found.extend("ab")), (ev.StepStarts, lambda _: None)]
    )
    watched = subscriber_suite._Watched(inner)
    (_, ends), (_, starts) = watched.subscriptions()
    ends(None)
    starts(None)
    ends(None)
    assert watched.reads == {"StepEnds": 4}
    suite = Watching()
    suite.pairs = list(watched.subscriptions())
    suite.trained = lambda _directory, subscribers: [  # type: ignore[method-assign, assignment]
        handler(None) for one in subscribers for _, handler in one.subscriptions()
    ]
    with pytest.raises(AssertionError, match="handlers read values of tensors on the host: {'StepEnds': 2}; take"):
        suite.test_handlers_never_wait_for_the_device(tmp_path)
    suite.pairs = suite.pairs[1:]
    suite.test_handlers_never_wait_for_the_device(tmp_path)
    suite.waits = True  # type: ignore[misc]
    with skipped("Watching.waits is True"):
        suite.test_handlers_never_wait_for_the_device(tmp_path)


def test_files_are_compared_where_other_processes_can_build_the_subscriber(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with skipped("Watching overrides build.., so other processes cannot build the subscriber"):
        Watching().files_of_one_process(tmp_path)
    runs: list[Any] = []
    monkeypatch.setattr(subscriber_suite, "watched_run", lambda *given: runs.append(given))

    class Writes(SubscriberSuite):
        def job_for_files(self, directory: Path) -> Any:
            return directory, "plugins", "address"

        def files(self, directory: Path) -> Any:
            return self.found

        found: Any = {}

    with skipped("the subscriber writes no files in directory or in the run's directory"):
        Writes().files_of_one_process(tmp_path)
    Writes.found = {"a": b"x"}
    assert Writes().files_of_one_process(tmp_path) == {"a": b"x"}
    assert runs == [(tmp_path, "plugins", "address")] * 2
    with pytest.raises(AssertionError, match="a run that an observer interrupts goes on"):
        Writes().test_files_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path)

    def interrupted(*given: Any) -> None:
        runs.append(given)
        if len(given) == 4:
            assert given[3]._step == 5
            for step in (3, 4, 5, 8):
                (given[0] / "suite" / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
            raise subscriber_suite.Interruption

    monkeypatch.setattr(subscriber_suite, "watched_run", interrupted)
    runs.clear()
    Writes().test_files_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path)
    assert [(given[0].name, len(given)) for given in runs] == [("one", 3), ("resumed", 4), ("resumed", 3)]
    left = (tmp_path / "resumed" / "suite" / "checkpoints").iterdir()
    assert sorted(path.name for path in left) == ["step-00000003", "step-00000004"]


# --- launchers


class Launches(LauncherSuite):
    """Suite of a launcher that refuses some requests, and starts so many processes."""

    refuses: Any = None
    starts = 0

    def stand_ins(self, *_: Any) -> Any:
        return SimpleNamespace(first_in_path=lambda _monkeypatch: None, calls=list)

    def request(self, directory: Path, _stand_ins: Any, **facts: Any) -> Any:
        return SimpleNamespace(folder=directory / "folder", job=directory / "job.yaml", **facts)

    def prepared(self, request: Any, **_: Any) -> Any:
        if self.refuses is not None and self.refuses(request):
            raise LaunchError(self.reason)
        return SimpleNamespace(files={}, command=())

    reason = "use --nodes 1"
    arguments: Any = None

    def started(self, submission: Any, request: Any, stand_ins: Any) -> Any:
        words = self.arguments if self.arguments is not None else ("run", *getattr(request, "options", ()), "last")
        return Started(processes=self.starts, job=request.job, arguments=words)


def test_what_a_suite_of_a_launcher_has_to_say() -> None:
    nothing: Any = None
    with pytest.raises(NotImplementedError, match=r"^LauncherSuite\.started must say which processes a submission"):
        LauncherSuite().started(nothing, nothing, nothing)
    with pytest.raises(NotImplementedError, match=r"^LauncherSuite\.unknown must give an identifier that the engine"):
        LauncherSuite().unknown(nothing)


@pytest.mark.parametrize(
    ("nodes", "processes", "starts", "refuses", "reason", "says"),
    [
        (2, 4, 8, False, "", None), (1, 3, 3, False, "", None),
        (2, 4, 4, False, "", "2 x 4 processes are asked for, and 4 started"),
        (2, 4, 0, True, "use --nodes 1", None), (2, 4, 0, True, "no", "2 machines are refused without the option"),
        (1, 3, 0, True, "use --nodes 1", "one machine is refused: use --nodes 1"),
    ],
)  # fmt: skip
def test_an_engine_starts_all_processes_or_refuses_several_machines(
    nodes: int, processes: int, starts: int, refuses: bool, reason: str, says: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("d9d_testing.suites.launcher._write", lambda *_: None)
    suite = Launches()
    suite.starts, suite.refuses, suite.reason = starts, lambda _request: refuses, reason
    if says is None:
        suite.test_the_size_is_respected(tmp_path, monkeypatch, nodes, processes)
    else:
        with pytest.raises(AssertionError, match=says):
            suite.test_the_size_is_respected(tmp_path, monkeypatch, nodes, processes)


def test_hostile_texts_arrive_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_testing.suites.launcher._write", lambda *_: None)

    def check(number: int, says: str | None = None, **facts: Any) -> None:
        place = tmp_path / str(number)
        place.mkdir()
        suite = Launches()
        for name, value in facts.items():
            setattr(suite, name, value)
        if says is None:
            suite.test_texts_of_users_arrive_as_they_are(place, monkeypatch)
        else:
            with pytest.raises(AssertionError, match=says):
                suite.test_texts_of_users_arrive_as_they_are(place, monkeypatch)

    check(0)
    check(1, refuses=lambda request: "--plugin" in request.options, reason="--plugin is hostile")
    check(2, "a folder with a hostile name is refused: no", refuses=lambda request: True, reason="no")
    check(3, r"\('--no-plugins',\) is refused", refuses=lambda request: True, reason="--plugin")
    check(4, "the options .* arrive as ..run..", arguments=("run",))


def test_identifiers_that_are_malformed_or_unknown_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``cancel`` and by ``status``, without a command."""

    def launcher(fails: Any, state: str = "unknown") -> Any:
        def call(name: str) -> Any:
            def called(identifier: str, *more: Any) -> Any:
                if fails(name, identifier):
                    raise LaunchError("no")
                assert not more or more == (tmp_path, 3)
                return SimpleNamespace(state=state)

            return called

        return SimpleNamespace(cancel=call("cancel"), status=call("status"))

    def suite(fails: Any, calls: Any = (), state: str = "unknown") -> Any:
        made = Launches()
        made.build = lambda **_: launcher(fails, state)  # type: ignore[method-assign]
        made.unknown = lambda _stand_ins: "4711"  # type: ignore[method-assign]
        made.stand_ins = lambda *_: SimpleNamespace(  # type: ignore[method-assign]
            first_in_path=lambda _monkeypatch: None, calls=lambda: list(calls)
        )
        return made

    suite(lambda *_: True).test_malformed_identifiers_reach_no_command(tmp_path, monkeypatch)
    for name in ("cancel", "status"):
        with pytest.raises(AssertionError, match=rf"{name}\(.*\) raises no LaunchError"):
            suite(lambda call, _, name=name: call != name).test_malformed_identifiers_reach_no_command(
                tmp_path, monkeypatch
            )
    last = launcher_suite._MALFORMED[-1]
    with pytest.raises(AssertionError, match="raises no LaunchError"):
        suite(lambda _, text: text != last).test_malformed_identifiers_reach_no_command(tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=r"a malformed identifier reaches \[\['batch'\]\]; check it first"):
        suite(lambda *_: True, [["batch"]]).test_malformed_identifiers_reach_no_command(tmp_path, monkeypatch)
    suite(lambda *_: True).test_an_unknown_submission_is_told(tmp_path, monkeypatch)
    suite(lambda call, _: call == "cancel").test_an_unknown_submission_is_told(tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="status.. of a submission that the engine does not know is 'running'"):
        suite(lambda call, _: call == "cancel", state="running").test_an_unknown_submission_is_told(
            tmp_path, monkeypatch
        )
    with pytest.raises(AssertionError, match="cancel.. of a submission that the engine does not know raises no"):
        suite(lambda call, _: call == "status").test_an_unknown_submission_is_told(tmp_path, monkeypatch)


def test_a_submission_is_prepared_without_files_calls_and_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suite(prepared: Any, calls: Any = ()) -> Any:
        made = Launches()
        made.exports = {"export": ["D9D_SECRET"]}  # type: ignore[misc]
        made.prepared = prepared  # type: ignore[method-assign]
        made.stand_ins = lambda *_: SimpleNamespace(calls=lambda: list(calls))  # type: ignore[method-assign]
        return made

    def submission(**files: str) -> Any:
        named = {tmp_path / "folder" / name: text for name, text in files.items()}
        return SimpleNamespace(files=named, command=("run", "it"))

    sound = suite(lambda request, **_: submission(script="run"))
    sound.test_a_submission_is_prepared_without_the_engine_and_writes_nothing(tmp_path, monkeypatch)
    sound.test_files_of_a_submission_lie_in_its_folder(tmp_path)
    sound.test_no_variable_of_the_environment_is_in_a_submission(tmp_path, monkeypatch)
    paths: list[str] = []
    suite(
        lambda request, **_: paths.append(os.environ["PATH"]) or submission()  # type: ignore[func-returns-value]
    ).test_a_submission_is_prepared_without_the_engine_and_writes_nothing(tmp_path, monkeypatch)
    assert paths == [str(tmp_path / "empty")]  # no command is found there

    def writes(request: Any, **_: Any) -> Any:
        (tmp_path / "file").touch()
        return submission()

    with pytest.raises(AssertionError, match="prepare.. writes .*file.*; only return the texts"):
        suite(writes).test_a_submission_is_prepared_without_the_engine_and_writes_nothing(tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=r"prepare.. runs \[\['batch'\]\]; leave that to submit"):
        suite(
            lambda request: submission(), [["batch"]]
        ).test_a_submission_is_prepared_without_the_engine_and_writes_nothing(tmp_path, monkeypatch)
    for name in ("job.yaml", "submission.json"):
        with pytest.raises(AssertionError, match=f"{name} would replace a file of d9d launch"):
            suite(lambda request, name=name: submission(**{name: ""})).test_files_of_a_submission_lie_in_its_folder(
                tmp_path
            )
    outside = SimpleNamespace(files={tmp_path / "x": ""}, command=())
    with pytest.raises(AssertionError, match="x is not in .*folder"):
        suite(lambda request: outside).test_files_of_a_submission_lie_in_its_folder(tmp_path)
    for secret in launcher_suite._SECRETS:
        value = f"value-of-{secret}"
        for leaks in (
            submission(script=f"export {value}"), SimpleNamespace(files={}, command=("run", value)),
            SimpleNamespace(files={tmp_path / value: ""}, command=()),
        ):  # fmt: skip
            for when in (True, False):  # with a variable to export, and without
                made = suite(
                    lambda request, leaks=leaks, when=when, **fields: leaks if bool(fields) == when else submission()
                )
                with pytest.raises(AssertionError, match=f"the submission has the value of {secret}"):
                    made.test_no_variable_of_the_environment_is_in_a_submission(tmp_path, monkeypatch)


# --- models, fine-tuning methods, strategies, schedules, tasks and datasets


def test_suites_skip_what_their_components_do_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = SimpleNamespace(hugging_face=None, flops=None, name="m", provides={"a"})
    nothing: Any = None
    for check in (
        lambda: ModelSuite().test_hugging_face_round_trip_is_bitwise(spec, nothing, nothing),
        lambda: ModelSuite().test_matrices_are_exported_as_linear_layers_hold_them(spec, nothing),
    ):
        with skipped("the model has no Hugging Face format"):
            check()
    monkeypatch.setattr(
        model_suite, "_LAYOUT_PLUGINS", ("no_such_package.plugin", "d9d_core.plugin", "nor_this.plugin")
    )
    with skipped("needs no_such_package.plugin, nor_this.plugin"):
        ModelSuite().test_every_data_parallel_layout_computes_the_same(nothing)
    with pytest.raises(NotImplementedError):
        ModelSuite().reference_logits(nothing, nothing, nothing)

    class Method(PeftSuite):
        matches_nothing = {}

        def build(self, **_: Any) -> Any:
            return object()

    with skipped("Method.matches_nothing has no fields that match no layer"):
        Method().test_a_method_that_matches_nothing_is_refused()
    with skipped("the method does not implement off"):
        Method().test_switched_off_it_computes_as_the_model_did(False)
    monkeypatch.setattr(peft_suite, "find_spec", lambda name: None if name == "d9d_parallel" else name)
    with skipped("needs d9d-parallel"):
        Method().need_layouts()
    monkeypatch.setattr(peft_suite, "find_spec", lambda name: name)
    Method().need_layouts()

    class File(ScheduleSuite):
        plugin = "mine.py"

    with skipped("a single-file plugin"):
        File().test_it_is_made_without_torch()

    class Data(DatasetSuite):
        def build(self, **_: Any) -> Any:
            return None

    with skipped("Data overrides build.., so another process cannot build the dataset"):
        Data().test_order_is_the_same_in_another_process(tmp_path)
    with pytest.raises(AssertionError, match=r"^InferenceTaskSuite must override case\(\); return outputs of a model"):
        InferenceTaskSuite().case()


def test_a_method_that_starts_from_weights_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []

    class Starts:
        def inject(self, stage: nn.Module) -> frozenset[str]:
            return frozenset({"weight"})

        def start(self, stage: Any) -> None:
            started.append(stage.weight[0, 0].item())

    class Method(PeftSuite):
        def on_meta(self) -> nn.Module:
            with torch.device("meta"):
                return nn.Linear(2, 2)

    monkeypatch.setattr(peft_suite, "StartsFromWeights", Starts)
    monkeypatch.setattr(peft_suite, "initialise", lambda stage, seed, device: stage.weight.data.fill_(7.0))
    stage, named = Method().adapted(Starts())
    assert (started, named) == ([7.0], {"weight"})
    assert bool(stage.bias.isnan().all())  # what initialisation leaves out shows
    assert Method().adapted()[1] == frozenset()
    assert started == [7.0]


def test_a_strategy_without_declared_collectives_declares_none() -> None:
    class Undeclared(StrategySuite):
        meshes = ({"dp_shard": 2},)
        settings = ({"a": 1}, {"a": 2})
        declares_collectives = False
        found: Any = (None, None)

        def applied(self, mesh: Any, settings: Any) -> Any:
            return None, SimpleNamespace(collectives=self.found[settings["a"] - 1])

    Undeclared().test_the_collectives_of_a_traced_step_are_those_it_declares()
    Undeclared.found = (None, ())
    with pytest.raises(AssertionError, match="'a': 2}: Applied.collectives is declared; remove declares_collectives"):
        Undeclared().test_the_collectives_of_a_traced_step_are_those_it_declares()
    Undeclared.declares_collectives = True
    with pytest.raises(AssertionError, match="'a': 1}: Applied.collectives is None, so that d9d explain cannot list"):
        Undeclared().test_the_collectives_of_a_traced_step_are_those_it_declares()


def test_sums_of_a_task_are_numbers_of_all_samples() -> None:
    class Sums(TaskSuite):
        def whole(self) -> Any:
            return "all"

        def sums(self, task: Any, samples: Any) -> Any:
            return {"a": torch.tensor(2.5), task: torch.tensor(1.0 if samples == "all" else 0.0)}

    assert Sums()._numbers("b") == {"a": 2.5, "b": 1.0}


# --- support


def test_the_first_tensor_is_found_at_any_depth() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    for values, found in (
        ([3, first, second], first), ([{"a": 1, "b": first}, second], first), ([(None, [second, first])], second),
        ([{"a": [first]}], first), (["a", 3], None), ([], None),
    ):  # fmt: skip
        assert model_matrices._first_tensor(values) is found


def test_ops_with_several_results_are_called_like_models_do() -> None:
    call = KNOWN_OPS["rope"].calls()[0]
    given: list[Any] = []

    def slot(*inputs: Any, **options: Any) -> Any:
        given.append((inputs, options))
        return inputs[0], inputs[1]

    made: Any = slot
    out = KNOWN_OPS["rope"].invoke(made, call)
    assert torch.equal(out, torch.cat([call.inputs["query"], call.inputs["key"]], dim=2))
    assert all(one is other for one, other in zip(given[0][0], call.inputs.values(), strict=True))
    for call in KNOWN_OPS["add_rms_norm"].calls()[:2]:
        given.clear()
        made = lambda x, added, weight, **options: given.append((x, added, weight, options)) or (x, 2 * x)  # noqa: E731
        out = KNOWN_OPS["add_rms_norm"].invoke(made, call)
        assert torch.equal(out, torch.cat([call.inputs["x"], 2 * call.inputs["x"]], dim=-1))
        ((x, added, weight, options),) = given
        assert (x is call.inputs["x"], added is call.inputs.get("added"), weight is call.inputs["weight"]) == (
            True,
        ) * 3
        assert options == {"eps": 1e-6}


def test_random_recurrences_cover_their_range() -> None:
    for name, (samples, value) in {"gated_delta_rule": ("query", "value"), "state_space_rule": ("B", "x")}.items():
        make, random = KNOWN_OPS[name].at_random, Random(1)
        assert make is not None
        made = [make(random) for _ in range(600)]
        of: list[tuple[int, ...]] = [tuple(call.inputs[samples].shape) for call in made]
        assert [(min(sizes), max(sizes)) for sizes in list(zip(*of, strict=True))[:3]] == [(1, 2), (1, 150), (1, 3)]
        shared = {call.inputs[value].shape[2] // call.inputs[samples].shape[2] for call in made}
        features = {call.static["key_dim" if name == "gated_delta_rule" else "head_dim"] for call in made}
        assert (shared, features) == ({1, 2, 3}, set(range(1, 10)))
        assert {bool(call.documents) for call in made} == {True, False}
        sizes = [shape[:3] for shape in ((call.inputs[samples].shape) for call in KNOWN_OPS[name].calls())]
        assert [tuple(size) for size in sizes] == [(2, 7, 2), (1, 1, 1), (1, 70, 2), (2, 130, 1)]


def test_groups_of_functional_collectives_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        pass

    group = Group()
    monkeypatch.setattr(collectives.dist, "ProcessGroup", Group)
    monkeypatch.setattr(collectives.dist.distributed_c10d, "_resolve_process_group", {"7": group}.__getitem__)
    assert collectives._group({"group_name": "7"}) is group
    assert collectives._group({"process_group": group, "group_name": "8"}) is group  # type: ignore[dict-item]
    with pytest.raises(AssertionError, match=r"no process group among \['a'\]"):
        collectives._group({"a": 1})
    assert collectives._bytes([torch.ones(3), [torch.ones(2, dtype=torch.int16)]]) == 16


def test_distributed_tensors_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distributed:
        pass

    monkeypatch.setattr(wire, "DTensor", Distributed)
    with pytest.raises(TypeError, match=r"value\['a'\]\[1\] is a DTensor; send its to_local\(\) or full_tensor\(\)"):
        wire.pack({"a": [1, Distributed()]})


def test_functions_of_scripts_are_found_without_running_the_script_as_main(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("class Outer:\n    name = __name__\n    def inner(): return 'found'\n")

    def launch(module: str, file: str, name: str) -> Any:
        return SimpleNamespace(module=module, file=file, qualname=name)

    before = set(sys.modules)
    script = str(tmp_path / "script.py")
    try:
        assert worker._find(launch("__main__", script, "Outer.inner"))() == "found"
        assert sys.modules["__mp_main__"].Outer.name == "__mp_main__"
        assert worker._find(launch("no.such.module", script, "Outer.inner"))() == "found"
        assert sys.modules["no.such.module"].Outer.name == "no.such.module"
        assert worker._find(launch("d9d_testing.world.wire", str(wire.__file__), "pack")) is wire.pack
        with pytest.raises(ImportError, match=r"a\.txt is not a Python file"):
            worker._module(launch("mine", str(tmp_path / "a.txt"), "x"))
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


def test_modules_are_imported_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answer = SimpleNamespace(returncode=0, stderr="")

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command[:2], json.loads(options.pop("input")), options))
        return answer

    monkeypatch.setattr(fresh.subprocess, "run", run)
    answer.stdout = 'a warning\n{"a": [12.5, ["a", "torch", "b"]], "c": [1.0, []]}\n'
    found = fresh.import_fresh("a", "c")
    assert found == {
        "a": fresh.ImportFacts(12.5, frozenset({"a", "torch", "b"})), "c": fresh.ImportFacts(1.0, frozenset()),
    }  # fmt: skip
    assert (found["a"].heavy, found["c"].heavy) == (["torch"], [])
    assert asked == [
        ([sys.executable, "-c"], [sys.path, ["a", "c"]], {"capture_output": True, "text": True, "check": False})
    ]
    answer.returncode, answer.stderr = 1, "no module named a"
    with pytest.raises(AssertionError, match="no module named a"):
        fresh.import_fresh("a")


def test_tokens_of_the_core_and_fields_without_a_text_are_known() -> None:
    tokens = (
        "mesh:tp",
        "mesh:xy",
        "model:blocks",
        "model:wheels",
        "device:cuda>=9",
        "device:",
        "import:x",
        "acme:x",
        "x",
    )
    found = [token for token in tokens if plugin_suite._is_core_token(token)]
    assert found == ["mesh:tp", "model:blocks", "device:cuda>=9", "import:x"]
    schema = {
        "properties": {"a": {"description": "A."}, "b": {"description": " "}, "c": {}},
        "$defs": {"Inner": {"properties": {"d": {}}}},
    }
    assert list(plugin_suite._undocumented(schema, "Config")) == [("Config", "b"), ("Config", "c"), ("Inner", "d")]
    assert list(plugin_suite._undocumented({}, "Config")) == []


@pytest.mark.parametrize(("summary", "fine"), [("x" * 100, True), ("x" * 101, False), ("a\nb", False), ("a", True)])
def test_summaries_have_one_line_of_100_characters(summary: str, fine: bool) -> None:
    suite = PluginSuite()
    suite._entries = lambda: [SimpleNamespace(spec=SimpleNamespace(summary=summary))]  # type: ignore[method-assign]
    if fine:
        suite.test_summaries_are_one_line()
    else:
        with pytest.raises(AssertionError, match="the summary must be one line of at most 100 characters"):
            suite.test_summaries_are_one_line()


def test_the_stated_plugin_api_is_one_that_core_offers() -> None:
    oldest, newest = plugin_suite.OLDEST_API, plugin_suite.NEWEST_API
    suite = PluginSuite()
    suite.plugin = "acme.plugin"  # type: ignore[misc]
    for stated, says in (
        (oldest, None), (newest, None), (oldest - 1, "this d9d-core offers"), (newest + 1, "this d9d-core offers"),
        (None, f"acme.plugin: D9D_API is None; write D9D_API = {newest}"), (float(newest), "write D9D_API"),
    ):  # fmt: skip
        suite._module = lambda stated=stated: SimpleNamespace(D9D_API=stated)  # type: ignore[method-assign]
        if says is None:
            suite.test_declares_its_plugin_api()
        else:
            with pytest.raises(AssertionError, match=says):
                suite.test_declares_its_plugin_api()
    suite._module = SimpleNamespace  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="D9D_API is None"):
        suite.test_declares_its_plugin_api()
    suite._entries = list  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="acme.plugin declares no records; are its hooks decorated with @hookimpl"):
        suite.test_registers_at_least_one_record()


def test_a_library_that_a_record_requires_may_be_absent_on_this_platform() -> None:
    def missing(name: str) -> Any:
        def load() -> Any:
            raise ModuleNotFoundError("absent", name=name)

        return SimpleNamespace(load=load)

    class Declared(Spec):
        def refs(self) -> Any:
            return references

    references: dict[str, Any] = {}
    entry: Any = SimpleNamespace(spec=Declared(name="part", summary="Part.", requires={"import:absentlib.part"}))

    def problems(**found: Any) -> list[str]:
        references.clear()
        references.update(found)
        return list(plugin_suite._reference_problems(entry))

    assert problems(build=missing("absentlib")) == []
    (problem,) = problems(build=missing("otherlib"))
    assert problem.endswith(" does not load: ModuleNotFoundError('absent')")
    (problem,) = problems(build=SimpleNamespace(load=lambda: 3), config=SimpleNamespace(load=lambda: 3))
    assert problem.endswith("is a int, which is not callable")


def test_children_whose_outputs_add_up_to_a_change_are_found() -> None:
    start, big = torch.ones(2, 3), torch.tensor([[1e6, 0.0, 0.0], [0.0, 0.0, 0.0]])
    parts = {"input": start, "a": torch.full((2, 3), 2.0), "b": torch.full((2, 3), 3.0), "c": torch.full((2, 3), 7.0)}
    for change, chosen in ((3.0, ("b",)), (5.0, ("a", "b")), (12.0, ("a", "b", "c")), (4.0, ())):
        assert model_matrices._summands({"": start + change, **parts}) == chosen
    # Differences are as large as the rounding of the largest number.
    rounded = {"": big, "input": torch.zeros(2, 3), "a": big + 5}
    assert model_matrices._summands(rounded) == ("a",)
    assert model_matrices._summands({**rounded, "a": big + 20}) == ()
    assert model_matrices._summands({**rounded, "input": torch.zeros(2)}) == ()


def test_a_single_file_is_a_plugin_of_a_suite(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from d9d_core.plugin import *\n"
        "class Config: pass\n"
        "@hookimpl\n"
        "def d9d_tasks():\n"
        "    ref = Ref(f'{__name__}:Config')\n"
        "    yield TaskSpec(name='mine', summary='x', config=ref, build=ref)\n"
    )
    assert registry_of(str(tmp_path / "mine.py")).find("task", "mine").spec.summary == "x"  # type: ignore[union-attr]


def test_a_model_that_does_not_claim_a_capability_is_skipped() -> None:
    spec: Any = SimpleNamespace(name="m", provides=frozenset({"a"}))
    require(spec, "a")
    with pytest.raises(pytest.skip.Exception, match="^m does not claim b, c$"):
        require(spec, "c", "a", "b")


def test_the_last_step_of_a_job_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trained:
        def build(self, _say: Any, _topology: Any, observers: Any) -> Any:
            (recorder,) = observers
            steps = [[collectives.Call(kind, (0, 1), 4)] for kind in "abc"]
            return SimpleNamespace(train=lambda: recorder.steps.extend(steps))

    monkeypatch.setattr(collectives, "job_of", lambda _values, _plugins: Trained())
    monkeypatch.setattr(collectives, "topology_here", lambda _job: None)
    assert collectives.recorded_step({}, ()) == [("c", (0, 1), 4)]


def test_forgotten_calls_are_no_calls(tmp_path: Path) -> None:
    stand_ins = StandIns(tmp_path, ["run"])
    stand_ins.forget()
    assert stand_ins.calls() == []
    (tmp_path / ".calls").write_text('["run", "a"]\n["stop"]\n')
    assert (stand_ins.calls(), stand_ins.calls("stop")) == ([["run", "a"], ["stop"]], [["stop"]])
    stand_ins.forget()
    assert stand_ins.calls() == []
