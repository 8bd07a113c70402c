"""Tiny job for fault campaigns: launches it, tracks its processes, limits its disk, and cleans up."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from d9d_testing.processes import is_running

STEPS = 16
#: Size of a small disk, in bytes: enough for two checkpoints and an export.
DISK = 16_000_000
#: Environment variable that marks all processes of a round of the campaign.
MARK = "D9D_CAMPAIGN"
#: Longest wait for an event, in seconds.
PATIENCE = 300.0
#: Plugin that writes each event of the main rank to a file, one per line, so that the campaign can wait for it.
PLUGIN = """
import os
from typing import Literal
from d9d_core.config import PluginConfig
from d9d_core import events
from d9d_core.plugin import Ref, SubscriberSpec, hookimpl

class Config(PluginConfig):
    name: Literal["campaign"] = "campaign"
    file: str

class Recorder:
    def __init__(self, config):
        self.file = config.file
    def subscriptions(self):
        kinds = ("StepEnds", "CheckpointStarts", "CheckpointSaved", "EvaluationStarts")
        return [(getattr(events, kind), self.write) for kind in kinds]
    def write(self, event):
        if os.environ.get("RANK", "0") == "0":
            step = event.report.step if hasattr(event, "report") else event.step
            with open(self.file, "a") as file:
                file.write(f"{type(event).__name__} {step}\\n")

@hookimpl
def d9d_subscribers():
    config, build = Ref(f"{__name__}:Config"), Ref(f"{__name__}:Recorder")
    yield SubscriberSpec(name="campaign", summary="records", config=config, build=build)
"""


class DeviationError(Exception):
    """A round did not end as required."""


class Run:
    """Run of the job in its own directory, with its launches.

    Args:
        home: directory of the round, created here.
        corpus: directory of the training texts.
    """

    def __init__(self, home: Path, corpus: Path) -> None:
        self.home = home
        self.directory = home / "runs" / "run"
        self.events = home / "events"
        self.temporary = home / "temporary"
        self.temporary.mkdir(parents=True)
        self.events.touch()
        (home / "plugin.py").write_text(PLUGIN)
        (home / "job.json").write_text(json.dumps(job(home, corpus)))
        self.process: subprocess.Popen[bytes]
        self.seen = 0

    def launch(self, *options: str) -> None:
        """Start the job, or continue it."""
        self.seen = len(self.events.read_text().splitlines())
        environ = os.environ | {MARK: str(self.home), "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "d9d_core", "train", str(self.home / "job.json"), "--nproc", "2", *options]
        with (self.home / "output").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environ)

    @property
    def output(self) -> str:
        """Output of the last launch."""
        return (self.home / "output").read_text(errors="replace")

    def happened(self) -> list[str]:
        """Events since the last launch."""
        return self.events.read_text().splitlines()[self.seen :]

    def await_event(self, event: str) -> None:
        """Wait until an event has happened or the run has ended; return at once for an empty event."""
        wait_until(lambda: not event or event in self.happened() or self.process.poll() is not None)

    def end(self) -> int:
        """Wait until the launch and all its processes have ended; return the exit status."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise DeviationError(f"the launch does not end: {self.output[-2000:]}") from None
        with suppress(TimeoutError):
            wait_until(lambda: not self.processes(), 30)
        if left := self.processes():
            raise DeviationError(
                f"processes are still running: {[(pid, command_of(pid)) for pid in left]}; {self.output[-2000:]}"
            )
        return status

    @contextmanager
    def small_disk(self) -> Iterator[None]:
        """Mount a small file system for the run's directory. Needs the right to mount."""
        disk = self.directory.parent
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True)
        try:
            yield
        finally:
            self.clear()
            subprocess.run(["umount", str(disk)], check=True)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Fill the small disk completely within the block."""
        filler = self.directory.parent / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        yield
        filler.unlink()

    def keep(self) -> None:
        """Copy the finished run, so that it outlives its disk."""
        self.directory = Path(shutil.copytree(self.directory, self.home / "kept"))

    def processes(self) -> list[int]:
        """Processes of this round, found by the mark in their environment."""
        mark = f"{MARK}={self.home}\0".encode()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in file.read_bytes() and is_running(int(file.parent.name)):
                    found.append(int(file.parent.name))
        return found

    def clear(self) -> None:
        """Kill all remaining processes of the round."""
        for pid in self.processes():
            send(pid, signal.SIGKILL)


def job(home: Path, corpus: Path) -> dict[str, Any]:
    """Tiny job with checkpoints, evaluations and an export, which takes seconds."""
    data = {"name": "text", "sources": [str(corpus)], "sequence_length": 16, "held_out": 0.2}
    return {
        "run": {"name": "run", "dir": str(home / "runs")}, "device": "cpu", "steps": STEPS,
        "plugins": {"files": [str(home / "plugin.py")]},
        "subscribers": [{"name": "campaign", "file": str(home / "events")}],
        "mesh": {"dp_shard": 2}, "parallel": ["fsdp"], "batch": {"size": 4, "microbatch": 1},
        "model": {
            "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
        },
        "task": "causal_lm", "metrics": ["perplexity"], "data": {**data, "workers": 1},
        "evaluation": {"every": 4, "packs": 2, "data": {**data, "split": "held_out"}},
        "optimizer": {"name": "adamw", "lr": 0.01}, "lr_schedule": {"name": "cosine", "warmup_steps": 2},
        "trackers": [{"name": "jsonl", "picture": False}], "logging": {"every": 1},
        "checkpoint": {"every": 2, "keep": 1}, "timeouts": {"startup": 180, "step": 120, "checkpoint": 120},
    }  # fmt: skip


def expect(true: bool, text: str) -> None:
    """Raise ``DeviationError`` unless a condition is true."""
    if not true:
        raise DeviationError(text)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(true: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait until a condition is true; raise after the given seconds."""
    deadline = time.monotonic() + patience
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)


def command_of(pid: int) -> bytes:
    """Command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
