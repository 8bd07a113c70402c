"""Report about a submitted run: the engine's state, the run's progress, and the cause of a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d9d_core.launcher import EXIT_FAILED, EXIT_STOPPED, EngineStatus
from d9d_engine.run.directory import FAILURE, FILE, STOP, RunFailure, read_ending, read_failure, read_stop
from d9d_engine.trackers.lines import read_lines

from d9d_launch.record import SubmissionRecord


@dataclass(frozen=True)
class RunReport:
    """Report about a submitted run.

    Attributes:
        directory: directory of the run.
        record: record of the run's newest submission.
        engine: status that the engine reports.
    """

    directory: Path
    record: SubmissionRecord
    engine: EngineStatus

    @property
    def state(self) -> str:
        """State that the engine reports; ``stopped`` instead of ``failed`` if the run saved after a stop request."""
        status = self.engine.exit_status
        stopped = self._stop() is not None if status is None else status == EXIT_STOPPED
        return "stopped" if self.engine.state == "failed" and stopped else self.engine.state

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        record = self.record
        size = f"{record.nodes} x {record.processes} processes"
        yield f"{record.engine} {record.identifier}: {self.state} ({self.engine.detail}); {size}"
        if (progress := self._progress()) is not None:
            yield progress
        yield from self._ending()
        if (change := record.job_change()) is not None:
            yield f"{change}; the submission trains {self.directory / 'launch' / 'job.yaml'}"
        if self.engine.log:
            yield "last lines of the log:"
            yield from (f"  {line}" for line in self.engine.log)

    def _progress(self) -> str | None:
        last: Mapping[str, Any] | None = None
        for line in read_lines(self.directory / "metrics.jsonl"):
            last = line
        if last is None:
            return None
        loss = last.get("loss")
        text = f", loss {loss:.4g}" if isinstance(loss, float | int) else ""
        return f"last logged step: {last['step']}{text}"

    def _ending(self) -> Iterator[str]:
        """Yield a line about how the submission ended; none while it waits or runs.

        A start removes the files of earlier endings; until then, the submission's record tells that they are earlier.
        """
        if (ending := self._finish()) is not None:
            reason = f": {ending['reason']}" if ending.get("reason") else ""
            yield f"finished after step {ending['step']} of {ending['steps']}{reason}"
        elif (stop := self._stop()) is not None:
            cause = f" by {stop['request']}" if stop.get("request") else ""
            yield f"stopped{cause} after step {stop['step']} of {stop['steps']}, and saved"
        elif (failure := self._failure()) is not None:
            again = "; a restart would repeat this error" if failure.status == EXIT_FAILED else ""
            yield f"failed: {failure.error}{again}"

    def _finish(self) -> Mapping[str, Any] | None:
        # The start of a run that is already finished has no step to train, and keeps the file.
        hidden = self.engine.state != "finished" and self.record.is_earlier(self.directory, FILE)
        return None if hidden else read_ending(self.directory)

    def _stop(self) -> Mapping[str, Any] | None:
        return None if self.record.is_earlier(self.directory, STOP) else read_stop(self.directory)

    def _failure(self) -> RunFailure | None:
        return None if self.record.is_earlier(self.directory, FAILURE) else read_failure(self.directory)
