"""Refusals and skips of the suite of launchers, with stand-ins: no processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import LaunchError
from d9d_testing.suites import launcher as launcher_suite
from d9d_testing.suites.launcher import LauncherSuite, Started


def skipped(reason: str) -> Any:
    return pytest.raises(pytest.skip.Exception, match=reason)


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
