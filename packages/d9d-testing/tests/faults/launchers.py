"""Launchers with one fault each: a shell script that calls the engine ``batch`` and the interpreter."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from d9d_core.config import PluginConfig
from d9d_core.errors import LaunchError
from d9d_core.launcher import EngineStatus, LaunchRequest, Submission
from d9d_core.plugin import LauncherSpec, Ref, hookimpl
from d9d_testing.stand_ins import StandIns
from d9d_testing.suites.launcher import LauncherSuite, Started


class BatchConfig(PluginConfig):
    """Batch."""

    name: Literal["batch"] = "batch"
    """Selects this launcher."""
    export: list[str] = []
    """Variables."""


class Batch:
    """Sound."""

    def __init__(self, config: BatchConfig) -> None:
        self.config = config

    def require(self) -> None:
        """Check nothing."""

    def prepare(self, request: LaunchRequest) -> Submission:
        file = request.folder / "batch.sh"
        size = ["--nproc", str(self.size(request))]
        lines = [
            f"cd {self.quoted(str(request.working_directory))}",
            f"{' '.join(map(self.quoted, request.command))} {shlex.join(size)}",
            *self.more(request),
        ]
        return Submission(files={file: "\n".join(lines) + "\n"}, command=("batch", "-f", str(file)))

    def submit(self, submission: Submission) -> str:
        return subprocess.run(submission.command, check=True, capture_output=True, text=True).stdout.strip()

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:
        self.check(identifier)
        done = subprocess.run(["batch", "status", identifier], check=False, capture_output=True, text=True)
        return EngineStatus(state="unknown" if done.returncode else "running", detail=done.stdout)

    def cancel(self, identifier: str) -> str:
        self.check(identifier)
        if self.status(identifier, Path(), 0).state == "unknown":
            raise LaunchError(f"{identifier}: no such job")
        subprocess.run(["batch", "cancel", identifier], check=True)
        return "cancelled"

    def size(self, request: LaunchRequest) -> int:
        return request.nodes * request.processes

    def quoted(self, text: str) -> str:
        return shlex.quote(text)

    def more(self, request: LaunchRequest) -> list[str]:
        return []

    def check(self, identifier: str) -> None:
        if not re.fullmatch(r"\d{1,9}", identifier, re.ASCII):
            raise LaunchError(f"{identifier[:80]!r} is no number")


@hookimpl
def d9d_launchers() -> Any:
    """Declare the launcher."""
    config, build = Ref(f"{__name__}:BatchConfig"), Ref(f"{__name__}:Batch")
    yield LauncherSpec(name="batch", summary="Jobs of a batch system.", config=config, build=build)


class Sound(LauncherSuite):
    plugin = __file__
    target = "batch"
    commands = ("batch",)
    exports = {"export": ["D9D_SECRET"]}
    made: type[Batch] = Batch

    def build(self, *arguments: Any, **fields: Any) -> Any:
        return self.made(BatchConfig(**fields))

    def started(self, submission: Submission, request: LaunchRequest, stand_ins: StandIns) -> Started:
        (script,) = submission.files
        subprocess.run(["sh", str(script)], check=False)
        *_, call = [["python", "--nproc", "0"], *stand_ins.calls("python")]
        stand_ins.forget()
        size = int(call[call.index("--nproc") + 1])
        return Started(processes=size, arguments=call, job=request.job_file.read_text("utf-8"))

    def unknown(self, stand_ins: StandIns) -> str:
        stand_ins.answer("batch", "status", text="no such job", status=1)
        return "4711"

    def accepts(self, stand_ins: StandIns) -> None:
        stand_ins.answer("batch", "-f", text="4711")


def faulty(**methods: Any) -> Mapping[str, Any]:
    """Attributes of a suite whose launcher has some methods replaced."""
    return {"made": type("Faulty", (Batch,), methods)}


def refuses(_self: Batch, request: LaunchRequest) -> int:
    raise LaunchError(f"too large: {request.nodes}")


def writes(self: Batch, request: LaunchRequest) -> Submission:
    (request.working_directory / "draft.sh").write_text("")
    return Batch.prepare(self, request)


def calls(self: Batch, request: LaunchRequest) -> Submission:
    subprocess.run(["batch", "validate"], check=False)
    return Batch.prepare(self, request)


def elsewhere(self: Batch, request: LaunchRequest) -> Submission:
    submission = Batch.prepare(self, request)
    files = {request.working_directory / file.name: text for file, text in submission.files.items()}
    return Submission(files=files, command=submission.command)


def replaces_the_job(self: Batch, request: LaunchRequest) -> Submission:
    submission = Batch.prepare(self, request)
    return Submission(files={**submission.files, request.job_file: "steps: 1\n"}, command=submission.command)


def unknown_is_running(self: Batch, identifier: str, _folder: Path, _lines: int) -> EngineStatus:
    self.check(identifier)
    return EngineStatus(state="running", detail="")


def cancels_anything(self: Batch, identifier: str) -> str:
    self.check(identifier)
    return "cancelled"


def changes_the_job(_self: Batch, request: LaunchRequest) -> list[str]:
    return [f"echo steps: 1 >> {shlex.quote(str(request.job_file))}"]


FAULTS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "does not quote": (faulty(quoted=lambda _s, text: text), ""),
    "quotes by double quotes": (faulty(quoted=lambda _s, text: f'"{text}"'), "run as a command"),
    "quotes by single quotes": (faulty(quoted=lambda _s, text: f"'{text}'"), ""),
    "writes the environment": (
        faulty(more=lambda _s, _r: [f"export {name}={value}" for name, value in os.environ.items()]),
        "the submission has the value of",
    ),
    "writes the exported variables": (
        faulty(more=lambda self, _r: [f"export {name}={os.environ[name]}" for name in self.config.export]),
        "the submission has the value of D9D_SECRET",
    ),
    "forgets the number of machines": (
        faulty(size=lambda _s, request: request.processes),
        "2 x 4 processes are asked for",
    ),
    "starts one process": (faulty(size=lambda _s, _r: 1), "processes are asked for"),
    "refuses every size": (faulty(size=refuses), "too large"),
    "writes in prepare": (faulty(prepare=writes), "only return the texts"),
    "calls the engine in prepare": (faulty(prepare=calls), ""),
    "writes outside of its folder": (faulty(prepare=elsewhere), "is not in"),
    "replaces the job file": (faulty(prepare=replaces_the_job), "would replace a file of d9d launch"),
    "changes the job": (faulty(more=changes_the_job), "the job arrives as"),
    "does not check identifiers": (faulty(check=lambda _s, _i: None), ""),
    "knows every submission": (faulty(status=unknown_is_running), "does not know is 'running'"),
    "cancels an unknown submission": (faulty(cancel=cancels_anything), "raises no LaunchError"),
    "returns a number": (
        faulty(submit=lambda self, submission: int(Batch.submit(self, submission))),
        "return the identifier as a text",
    ),
}
