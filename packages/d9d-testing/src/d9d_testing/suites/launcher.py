"""Conformance suite of launchers: hostile texts, secrets, sizes, options, and unknown submissions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from d9d_core.errors import LaunchError
from d9d_core.launcher import LaunchRequest, Submission
from pydantic import ValidationError

from d9d_testing.stand_ins import StandIns
from d9d_testing.suites.support.component import ComponentSuite, configured

#: Name that a folder of a user may have; a shell, a YAML reader and a template would each misread a part of it.
_HOSTILE = 'it\'s "a" $(touch pwned) `touch pwned` ${HOME} %j {x} &a *b !c: - ;touch pwned #x'
#: Text of a job file that would end a quoted text, a here-document or a template into which a launcher copies it.
_JOB = (
    "run: {name: run}\n# '\"$(touch pwned)`touch pwned`\n---\nEOF\n'EOF'\n{{ template }}\n"
    'description: "a\\"; touch pwned; \'x\' \\\\ \N{SNOWMAN}"\n\ttab: |\n  - "%s"\n\n'
)
#: Environment variables whose values must not be in a submission.
_SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "D9D_SECRET")
#: Identifiers of submissions that no engine gives; the file with the identifier may have been changed.
_MALFORMED = ("", "; touch pwned", "--all", "$(touch pwned)", "a\nb", "../../x", "-1", "x" * 5000)


@dataclass(frozen=True, kw_only=True)
class Started:
    """Processes that an engine starts for a submission, as the submission's own files say.

    Attributes:
        processes: number of processes, over all machines.
        arguments: arguments of a process, among them the options of ``d9d train`` that the request has.
        job: text of the job file that the processes read.
    """

    processes: int
    arguments: Sequence[str]
    job: str


class LauncherSuite(ComponentSuite):
    """Conformance suite of launchers (:class:`d9d_core.launcher.Launcher`). The engine itself is not needed.

    Subclass it, name the launcher and the engine's commands, and read a submission as the engine does::

        class TestBatch(LauncherSuite):
            target = "batch"
            commands = ("batch",)

            def started(self, submission, request, stand_ins):
                subprocess.run(["sh", *map(str, submission.files)], check=True)  # the script calls the interpreter
                *_, call = stand_ins.calls("python")
                size = int(call[call.index("--nproc") + 1])
                return Started(processes=size, arguments=call, job=request.job_file.read_text())

            def unknown(self, stand_ins):
                stand_ins.answer("batch", "status", text="no such job", status=1)
                return "4711"

            def accepts(self, stand_ins):
                stand_ins.answer("batch", "-f", text="4711")

    The requests of the suite have the stand-in ``python`` as the interpreter, so a script that starts the processes
    can be run.

    Attributes:
        commands: commands of the engine, which stand-ins replace.
        exports: fields that pass the variable ``D9D_SECRET`` on to the processes; empty if the launcher has none.
    """

    kind = "launcher"

    commands: ClassVar[Sequence[str]] = ()
    exports: ClassVar[Mapping[str, Any]] = {}

    # --- for subclasses to override

    def started(self, submission: Submission, request: LaunchRequest, stand_ins: StandIns) -> Started:
        """Processes that the engine starts; the files of the submission are written.

        Run scripts with the stand-ins instead of searching in them, so that a wrong quote shows.
        """
        raise NotImplementedError(f"{type(self).__name__}.started must say which processes a submission starts")

    def unknown(self, stand_ins: StandIns) -> str:
        """Well-formed identifier of a submission that the engine does not know; prepare the engine's answers first."""
        raise NotImplementedError(
            f"{type(self).__name__}.unknown must give an identifier that the engine does not know"
        )

    def accepts(self, stand_ins: StandIns) -> None:
        """Prepare the answers of an engine that accepts a submission, and knows it afterwards."""

    # --- tests

    def test_a_submission_is_prepared_without_the_engine_and_writes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``--dry-run`` works without the engine's commands, calls none of them, and leaves no file."""
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        stand_ins = self.stand_ins(tmp_path)
        before = _files(tmp_path)
        self.prepared(self.request(tmp_path, stand_ins))
        assert _files(tmp_path) == before, f"prepare() writes {_files(tmp_path) - before}; only return the texts"
        assert stand_ins.calls() == [], f"prepare() runs {stand_ins.calls()}; leave that to submit()"

    def test_files_of_a_submission_lie_in_its_folder(self, tmp_path: Path) -> None:
        """Every file is in the request's folder, and none replaces the job file or the record of ``d9d launch``."""
        request = self.request(tmp_path, self.stand_ins(tmp_path))
        for file in self.prepared(request).files:
            assert file.parent == request.folder, f"{file} is not in {request.folder}"
            assert file.name not in ("job.yaml", "submission.json"), f"{file} would replace a file of d9d launch"

    def test_no_variable_of_the_environment_is_in_a_submission(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files and command have no value of an environment variable, even of one that is passed to the processes."""
        for name in _SECRETS:
            monkeypatch.setenv(name, f"value-of-{name}")
        for fields in ({}, self.exports):
            submission = self.prepared(self.request(tmp_path, self.stand_ins(tmp_path)), **fields)
            text = "\n".join([*submission.files.values(), *map(str, submission.files), *submission.command])
            found = [name for name in _SECRETS if f"value-of-{name}" in text]
            assert not found, f"with {dict(fields)}, the submission has the value of {found[0] if found else ''}"

    def test_texts_of_users_arrive_as_they_are(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Paths, options and the job file arrive unchanged, whatever quotes, commands or markup they contain.

        A launcher may refuse ``--plugin`` with an error that names the option.
        """
        place = tmp_path / _HOSTILE
        place.mkdir()
        stand_ins = self.stand_ins(tmp_path)
        stand_ins.first_in_path(monkeypatch)
        monkeypatch.chdir(place)
        plugin = str(place / "mine.py")
        for options in (("--plugin", plugin, "--no-plugins"), ("--no-plugins",)):
            request = self.request(place, stand_ins, options=options)
            try:
                submission = self.prepared(request)
            except LaunchError as error:
                assert "--plugin" in str(error), f"a folder with a hostile name is refused: {error}"  # noqa: PT017
                assert "--plugin" in options, f"{options} is refused: {error}"  # noqa: PT017
                continue
            _write(request, submission)
            started = self.started(submission, request, stand_ins)
            assert not list(tmp_path.rglob("pwned")), f"a part of a path or of the job is run as a command: {started}"
            words = list(started.arguments)
            arrived = any(words[at : at + len(options)] == list(options) for at in range(len(words)))
            assert arrived, f"the options {list(options)} arrive as {words}"
            assert started.job == request.job, f"the job arrives as {started.job!r}, but is {request.job!r}"

    @pytest.mark.parametrize(("nodes", "processes"), [(1, 1), (1, 3), (2, 4)])
    def test_the_size_is_respected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, processes: int
    ) -> None:
        """The engine starts nodes x processes; a launcher for one machine refuses more by an error about --nodes."""
        stand_ins = self.stand_ins(tmp_path)
        stand_ins.first_in_path(monkeypatch)
        request = self.request(tmp_path, stand_ins, nodes=nodes, processes=processes)
        try:
            submission = self.prepared(request)
        except LaunchError as error:
            assert nodes > 1, f"one machine is refused: {error}"  # noqa: PT017
            assert "--nodes" in str(error), f"{nodes} machines are refused without the option --nodes: {error}"  # noqa: PT017
            return
        _write(request, submission)
        found = self.started(submission, request, stand_ins).processes
        assert found == nodes * processes, f"{nodes} x {processes} processes are asked for, and {found} started"

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        """A misspelt option is an error that names this option."""
        with pytest.raises(ValidationError) as found:
            configured(self.kind, self.plugin, self.target, {**self.config, "no_such_option": 1})
        named = [error["loc"] for error in found.value.errors()]
        assert any("no_such_option" in location for location in named), f"the error names {named}"

    def test_malformed_identifiers_reach_no_command(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A malformed identifier, from a file that others may have changed, is refused before a command gets it."""
        stand_ins = self.stand_ins(tmp_path)
        stand_ins.first_in_path(monkeypatch)
        monkeypatch.chdir(tmp_path)
        launcher = self.build()
        for identifier in _MALFORMED:
            calls: Mapping[str, Callable[[str], Any]] = {
                "cancel": launcher.cancel,
                "status": lambda text: launcher.status(text, tmp_path, 3),
            }
            for name, call in calls.items():
                assert _refuses(call, identifier), f"{name}({identifier[:40]!r}) raises no LaunchError"
        assert stand_ins.calls() == [], f"a malformed identifier reaches {stand_ins.calls()}; check it first"
        assert not list(tmp_path.rglob("pwned"))

    def test_an_unknown_submission_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """``status`` says ``unknown`` or raises, and ``cancel`` raises, if the engine does not know a submission."""
        stand_ins = self.stand_ins(tmp_path)
        stand_ins.first_in_path(monkeypatch)
        identifier, launcher = self.unknown(stand_ins), self.build()
        try:
            state = launcher.status(identifier, tmp_path, 3).state
        except LaunchError:
            state = "unknown"
        assert state == "unknown", f"status() of a submission that the engine does not know is {state!r}"
        refused = _refuses(launcher.cancel, identifier)
        assert refused, "cancel() of a submission that the engine does not know raises no LaunchError"

    def test_a_job_file_that_changed_since_the_submission_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A submission's record has the job file's digest; the report says if the file changed. Needs d9d-launch."""
        launch = pytest.importorskip("d9d_launch.submit", reason="d9d-launch writes the record")
        from d9d_launch.record import SubmissionRecord, digest_of
        from d9d_launch.report import RunReport

        stand_ins = self.stand_ins(tmp_path)
        stand_ins.first_in_path(monkeypatch)
        self.accepts(stand_ins)
        request, launcher, job = self.request(tmp_path, stand_ins), self.build(), tmp_path / "job.yaml"
        job.write_text(request.job)
        request = replace(request, source=job, source_sha256=digest_of(job))
        engine = launch.Engine(self.target, dict(self.config), launcher)
        identifier = launch.submit(engine, request, launcher.prepare(request))
        assert isinstance(identifier, str), f"submit() returns {identifier!r}; return the identifier as a text"
        record = SubmissionRecord.read(request.folder)
        assert record is not None
        assert (record.identifier, record.engine) == (identifier, self.target)
        report = RunReport(request.folder.parent, record, launcher.status(identifier, request.folder, 3))
        assert "changed" not in "\n".join(report.lines())
        job.write_text(f"{request.job}# changed\n")
        assert "has changed since the submission" in "\n".join(report.lines())

    # --- helpers for subclasses

    def stand_ins(self, place: Path) -> StandIns:
        """Stand-ins for the engine's commands and for the interpreter ``python``."""
        return StandIns(place / "stand-ins", [*self.commands, "python"])

    def request(
        self, place: Path, stand_ins: StandIns, nodes: int = 1, processes: int = 2, options: Sequence[str] = ()
    ) -> LaunchRequest:
        """Request for a run below ``place``, with the stand-in ``python`` as the interpreter."""
        folder = place / "runs" / "a-run_1.x" / "launch"
        python = str(stand_ins.folder / "python")
        return LaunchRequest(
            name="a-run_1.x",
            command=(python, "-m", "d9d_core", "train", str(folder / "job.yaml"), *options),
            job=_JOB,
            job_file=folder / "job.yaml",
            folder=folder,
            working_directory=place,
            nodes=nodes,
            processes=processes,
        )

    def prepared(self, request: LaunchRequest, **fields: Any) -> Submission:
        """Submission of a request, with further config fields."""
        submission = self.build(**fields).prepare(request)
        assert isinstance(submission, Submission), f"prepare() returns {submission!r}; return a Submission"
        return submission


def _refuses(call: Callable[[str], Any], identifier: str) -> bool:
    try:
        call(identifier)
    except LaunchError:
        return True
    return False


def _files(place: Path) -> set[Path]:
    return set(place.rglob("*"))


def _write(request: LaunchRequest, submission: Submission) -> None:
    """Write the files of a submission, as ``d9d launch submit`` does."""
    request.folder.mkdir(parents=True, exist_ok=True)
    for path, text in {request.job_file: request.job, **submission.files}.items():
        path.write_text(text, "utf-8")
