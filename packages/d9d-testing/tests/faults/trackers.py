"""Trackers with one fault each: one line of JSON per write, in a file of the run's directory."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d9d_core.metric import Table
from d9d_core.tracker import Histogram, RunInfo, split_tags
from d9d_core.types import State
from d9d_testing.suites.tracker import Logged, TrackerSuite, by_step
from torch import Tensor


class Tracker:
    """Sound."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def open(self, run: RunInfo, state: State | None) -> Tracker:
        self.run = run
        self.path = run.directory / "log"
        self.lines = self.read() if run.resumed_step else []
        self.lines = [line for line in self.lines if line["step"] <= run.resumed_step]
        self.identity = (state or {}).get("id", "run-1" if state is None else "lost")
        self.save()
        return self

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def save(self) -> None:
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append({"step": step, "values": dict(values)})
        self.save()

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        self.lines += [{"step": step, "table": name} for name in tables]
        self.save()

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.lines += [{"step": step, "texts": name, "value": text} for name, text in texts.items()]
        self.save()

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self.lines += [{"step": step, "histograms": name} for name in histograms]
        self.save()

    def write_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        self.lines += [{"step": step, "pictures": name} for name in pictures]
        self.save()

    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            shutil.copyfile(path, self.run.directory / f"{name}.copy")

    def flush(self) -> None:
        self.save()

    def state(self) -> State:
        return {"id": self.identity}

    def close(self, status: str) -> None:
        self.write = self.flush = lambda *_: None  # type: ignore[method-assign]


class KeepsLaterSteps(Tracker):
    def open(self, run: RunInfo, state: State | None) -> Tracker:
        kept = json.dumps([]) if not run.resumed_step else (run.directory / "log").read_text()
        super().open(run, state)
        if run.resumed_step:
            self.path.write_text(kept)
            self.lines = self.read()
        return self


class CutsOneStepTooMany(Tracker):
    def open(self, run: RunInfo, state: State | None) -> Tracker:
        super().open(run, state)
        self.lines = [line for line in self.lines if line["step"] < run.resumed_step]
        self.save()
        return self


class AlwaysStartsAnew(Tracker):
    def open(self, run: RunInfo, state: State | None) -> Tracker:
        super().open(run, state)
        self.lines = []
        self.save()
        return self


class NeverStartsAnew(Tracker):
    def open(self, run: RunInfo, state: State | None) -> Tracker:
        before = (run.directory / "log").exists() and not run.resumed_step
        self.path = run.directory / "log"
        kept = self.read() if before else []
        super().open(run, state)
        self.lines = kept + self.lines
        self.save()
        return self


class ForgetsTheRunsIdentity(Tracker):
    def open(self, run: RunInfo, state: State | None) -> Tracker:
        super().open(run, None)
        self.identity = f"run-{time.monotonic_ns()}"
        return self


class RefusesNan(Tracker):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        json.dumps(values, allow_nan=False)
        super().write(step, values)


class KeepsTheMapping(Tracker):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append({"step": step, "values": values})


class FlushesNothing(Tracker):
    def save(self) -> None:
        if not getattr(self, "lines", None) or getattr(self, "closing", False):
            super().save()

    def close(self, status: str) -> None:
        self.closing = True
        self.save()
        super().close(status)


class WritesAfterClose(Tracker):
    def close(self, status: str) -> None:
        pass


class StateIsNoJson(Tracker):
    def state(self) -> State:
        return {"id": self.path}  # type: ignore[dict-item]


class ExitsOnFailure(Tracker):
    def open(self, run: RunInfo, state: State | None) -> Tracker:
        try:
            return super().open(run, state)
        except OSError as error:
            raise SystemExit("the backend is gone") from error


class WaitsForever(Tracker):
    def open(self, run: RunInfo, state: State | None) -> Tracker:
        try:
            return super().open(run, state)
        except OSError:
            time.sleep(0.4)
            raise


class ChangesTables(Tracker):
    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        for table in tables.values():
            table.values.nan_to_num_()
        super().write_tables(step, tables)


class ChangesHistograms(Tracker):
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        for histogram in histograms.values():
            histogram.counts.cumsum_(0)
        super().write_histograms(step, histograms)


class LosesPictures(Tracker):
    def write_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        self.picture = pictures


class KeepsTextsOfLaterSteps(Tracker):
    def open(self, run: RunInfo, state: State | None) -> Tracker:
        self.path = run.directory / "log"
        texts = [line for line in self.read() if "texts" in line] if run.resumed_step else []
        super().open(run, state)
        self.lines += [line for line in texts if line not in self.lines]
        self.save()
        return self


class DropsTags(Tracker):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        super().write(step, {split_tags(name)[0]: value for name, value in values.items()})


class MovesFiles(Tracker):
    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            path.rename(self.run.directory / f"{name}.copy")


class LinksFiles(Tracker):
    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            (self.run.directory / f"{name}.copy").symlink_to(path)


class WritesTwice(Tracker):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        super().write(step, values)
        super().write(step, values)


class ChangesValues(Tracker):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        super().write(step, {name.replace("/", "_"): value for name, value in values.items()})
        if isinstance(values, dict):
            values["step"] = step


class Sound(TrackerSuite):
    target = "faulty"
    patience = 0.3
    made_of: type[Tracker] = Tracker

    def build(self, *arguments: Any, **fields: Any) -> Tracker:
        return self.made_of(**fields)

    def logged(self, directory: Path) -> Logged:
        lines = [line for line in _lines(directory) if "values" in line]
        return by_step((line["step"], name, value) for line in lines for name, value in line["values"].items())

    def logged_kind(self, directory: Path, kind: str) -> Mapping[int, Sequence[str]]:
        found: dict[int, list[str]] = {}
        for line in _lines(directory):
            if kind in line:
                found.setdefault(line["step"], []).append(line[kind])
        return found

    def logged_file(self, directory: Path, name: str) -> bytes:
        return (directory / f"{name}.copy").read_bytes()

    def logged_tables(self, directory: Path) -> Mapping[int, Sequence[str]]:
        found: dict[int, list[str]] = {}
        for line in _lines(directory):
            if "table" in line:
                found.setdefault(line["step"], []).append(line["table"])
        return found


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log").read_text().splitlines()]


FAULTS = {
    "keeps steps after the checkpoint": ({"made_of": KeepsLaterSteps}, ""),
    "cuts one step too many": ({"made_of": CutsOneStepTooMany}, "remove entries after RunInfo.resumed_step"),
    "always starts anew": ({"made_of": AlwaysStartsAnew}, "remove entries after RunInfo.resumed_step"),
    "never starts anew": ({"made_of": NeverStartsAnew}, "must start empty"),
    "forgets the run's identity": ({"made_of": ForgetsTheRunsIdentity}, "continue the run whose state"),
    "refuses NaN": ({"made_of": RefusesNan}, "refuses the number 'eval/loss', which is no longer sent"),
    "keeps the mapping it was given": ({"made_of": KeepsTheMapping}, "logged are"),
    "flush keeps nothing": ({"made_of": FlushesNothing}, "write out buffers"),
    "writes after close": ({"made_of": WritesAfterClose}, "after close(), writes change"),
    "state is no JSON": ({"made_of": StateIsNoJson}, ""),
    "exits where the backend fails": ({"made_of": ExitsOnFailure}, "raises SystemExit"),
    "waits for a backend that fails": ({"made_of": WaitsForever}, "the run waits for it at its end"),
    "changes tables": ({"made_of": ChangesTables}, "changes the table"),
    "changes values": ({"made_of": ChangesValues}, "changes the values it is given"),
    "changes histograms": ({"made_of": ChangesHistograms}, "changes its argument"),
    "loses pictures": ({"made_of": LosesPictures}, "pictures are {}"),
    "keeps texts of later steps": ({"made_of": KeepsTextsOfLaterSteps}, "texts are"),
    "drops tags": ({"made_of": DropsTags}, "logged are"),
    "moves files": ({"made_of": MovesFiles}, "moves the file"),
    "links to files": ({"made_of": LinksFiles}, "copy it"),
    "writes each value twice": ({"made_of": WritesTwice}, "has step 1 twice"),
}
