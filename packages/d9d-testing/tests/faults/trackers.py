"""Trackers with one fault each: one line of JSON per write, in a file of the run's directory.

A single-file plugin, so that other processes find them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

from d9d_core.config import PluginConfig
from d9d_core.metric import Table
from d9d_core.plugin import Ref, TrackerSpec, hookimpl
from d9d_core.tracker import Histogram, RunInfo, split_tags
from d9d_core.types import State
from d9d_testing.suites.tracker import Logged, TrackerSuite, by_step
from torch import Tensor


class Tracker:
    """Sound."""

    @staticmethod
    def backend(directory: Path) -> list[dict[str, Any]]:
        """Read the lines of a run, as a user of the tracker does."""
        return [json.loads(line) for line in (directory / "log").read_text().splitlines()]

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
        self.lines += [{"step": step, "tables": name, "value": self.cells(table)} for name, table in tables.items()]
        self.save()

    def cells(self, table: Table) -> list[list[Any]]:
        names = table.rows or map(str, range(len(table.values)))
        rows = zip(names, table.values.tolist(), strict=True)
        return [[name, *(value if value == value else None for value in row)] for name, row in rows]

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.lines += [{"step": step, "texts": name, "value": text} for name, text in texts.items()]
        self.save()

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self.lines += [
            {"step": step, "histograms": name, "value": value.counts.tolist()} for name, value in histograms.items()
        ]
        self.save()

    def write_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        self.lines += [{"step": step, "pictures": name, "value": value.tolist()} for name, value in pictures.items()]
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


class HidesItsFailure(Tracker):
    """Goes on without its file."""

    def save(self) -> None:
        with suppress(OSError):
            super().save()


class WaitsAfterItsFailure(Tracker):
    """Opens its file with the first write, and at the end waits for entries that it could not write."""

    def open(self, run: RunInfo, state: State | None) -> Tracker:
        with suppress(OSError):
            return super().open(run, state)
        return self

    def close(self, status: str) -> None:
        if not self.path.exists():
            time.sleep(0.4)
        super().close(status)


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


class StoresZeroForNan(Tracker):
    def cells(self, table: Table) -> list[list[Any]]:
        return [[value or 0.0 for value in row] for row in super().cells(table)]


class ForgetsNamesOfRows(Tracker):
    def cells(self, table: Table) -> list[list[Any]]:
        return [[str(index), *row[1:]] for index, row in enumerate(super().cells(table))]


class JoinsLines(Tracker):
    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        super().write_texts(step, {name: " ".join(text.split()) for name, text in texts.items()})


class StoresShares(Tracker):
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        shares = {
            name: Histogram(value.counts / value.counts.sum(), value.low, value.high)
            for name, value in histograms.items()
        }
        super().write_histograms(step, shares)


class SwapsColours(Tracker):
    def write_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        super().write_pictures(step, {name: picture.flip(-1) for name, picture in pictures.items()})


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


class LosesWhatItsProcessHolds(Tracker):
    """A client with a cache: it is written at the end, and the process itself reads its cache."""

    cache: ClassVar[dict[Path, list[dict[str, Any]]]] = {}

    @classmethod
    def backend(cls, directory: Path) -> list[dict[str, Any]]:
        found = cls.cache.get(directory / "log")
        return Tracker.backend(directory) if found is None else found

    def read(self) -> list[dict[str, Any]]:
        return list(self.cache.get(self.path) or super().read())

    def save(self) -> None:
        self.cache[self.path] = self.lines

    def close(self, status: str) -> None:
        super().save()
        super().close(status)


class KeepsTheLastStep(Tracker):
    """Writes a step when the next one begins."""

    def save(self) -> None:
        kept, last = self.lines, max((line["step"] for line in self.lines), default=0)
        self.lines = [line for line in kept if line["step"] < last]
        super().save()
        self.lines = kept

    def close(self, status: str) -> None:
        super().save()
        super().close(status)


class SharesItsLines(Tracker):
    """All runs of a process have one list."""

    shared: ClassVar[list[dict[str, Any]]] = []

    def open(self, run: RunInfo, state: State | None) -> Tracker:
        super().open(run, state)
        self.shared += [line for line in self.lines if line not in self.shared]
        self.lines = self.shared
        return self


class KnowsTwoStatuses(Tracker):
    def close(self, status: str) -> None:
        code = {"finished": 0, "failed": 1}[status]
        super().close(str(code))


class ChangesValues(Tracker):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        super().write(step, {name.replace("/", "_"): value for name, value in values.items()})
        if isinstance(values, dict):
            values["step"] = step


class FaultyConfig(PluginConfig):
    """Lines of JSON with a fault."""

    name: Literal["faulty"] = "faulty"
    """Selects the tracker."""
    fault: str = ""
    """Fault of the tracker."""


def build(config: FaultyConfig) -> Tracker:
    """The tracker with the fault."""
    kinds: dict[str, type[Tracker]] = {kind.__name__: kind for kind in Tracker.__subclasses__()}
    return kinds.get(config.fault, Tracker)()


@hookimpl
def d9d_trackers() -> Iterator[TrackerSpec]:
    """The faulty one."""
    yield TrackerSpec(
        name="faulty",
        summary="Lines of JSON with a fault.",
        config=Ref(f"{__name__}:FaultyConfig"),
        build=Ref(f"{__name__}:build"),
    )


class Sound(TrackerSuite):
    plugin = __file__
    target = "faulty"
    patience = 0.3

    def backend(self, directory: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.build().backend(directory)
        return found

    def logged(self, directory: Path) -> Logged:
        lines = [line for line in self.backend(directory) if "values" in line]
        return by_step((line["step"], name, value) for line in lines for name, value in line["values"].items())

    def logged_kind(self, directory: Path, kind: str) -> Mapping[int, Sequence[str]]:
        found: dict[int, list[str]] = {}
        for line in self.backend(directory):
            if kind in line:
                found.setdefault(line["step"], []).append(line[kind])
        return found

    def logged_contents(self, directory: Path, kind: str) -> Mapping[int, Mapping[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for line in self.backend(directory):
            if kind in line:
                found.setdefault(line["step"], {})[line[kind]] = line["value"]
        return found

    def logged_file(self, directory: Path, name: str) -> bytes:
        return (directory / f"{name}.copy").read_bytes()

    def logged_tables(self, directory: Path) -> Mapping[int, Sequence[str]]:
        found: dict[int, list[str]] = {}
        for line in self.backend(directory):
            if "tables" in line:
                found.setdefault(line["step"], []).append(line["tables"])
        return found


def _fault(kind: type[Tracker], text: str) -> tuple[dict[str, Any], str]:
    return {"config": {"fault": kind.__name__}}, text


FAULTS = {
    "keeps steps after the checkpoint": _fault(KeepsLaterSteps, ""),
    "cuts one step too many": _fault(CutsOneStepTooMany, "remove entries after RunInfo.resumed_step"),
    "always starts anew": _fault(AlwaysStartsAnew, "remove entries after RunInfo.resumed_step"),
    "never starts anew": _fault(NeverStartsAnew, "must start empty"),
    "forgets the run's identity": _fault(ForgetsTheRunsIdentity, "continue the run whose state"),
    "refuses NaN": _fault(RefusesNan, "refuses the number 'eval/loss', which is no longer sent"),
    "keeps the mapping it was given": _fault(KeepsTheMapping, "logged are"),
    "flush keeps nothing": _fault(FlushesNothing, "write out buffers"),
    "writes after close": _fault(WritesAfterClose, "after close(), writes change"),
    "state is no JSON": _fault(StateIsNoJson, ""),
    "exits where the backend fails": _fault(ExitsOnFailure, "raises SystemExit"),
    "waits for a backend that fails": _fault(WaitsForever, "the run waits for it at its end"),
    "hides that its backend fails": _fault(HidesItsFailure, "no call raises although the backend fails"),
    "waits after its backend failed": _fault(WaitsAfterItsFailure, "close() takes"),
    "changes tables": _fault(ChangesTables, "changes the table"),
    "changes values": _fault(ChangesValues, "changes the values it is given"),
    "changes histograms": _fault(ChangesHistograms, "changes its argument"),
    "loses pictures": _fault(LosesPictures, "pictures are {}"),
    "stores zero for NaN": _fault(StoresZeroForNan, "contents of tables are"),
    "forgets names of rows": _fault(ForgetsNamesOfRows, "contents of tables are"),
    "joins lines of texts": _fault(JoinsLines, "contents of texts are"),
    "stores shares for counts": _fault(StoresShares, "contents of histograms are"),
    "swaps colours": _fault(SwapsColours, "contents of pictures are"),
    "keeps texts of later steps": _fault(KeepsTextsOfLaterSteps, "texts are"),
    "drops tags": _fault(DropsTags, "logged are"),
    "moves files": _fault(MovesFiles, "moves the file"),
    "links to files": _fault(LinksFiles, "copy it"),
    "loses records when its process is killed": _fault(LosesWhatItsProcessHolds, ""),
    "keeps the last step back": _fault(KeepsTheLastStep, ""),
    "runs share their lines": _fault(SharesItsLines, ""),
    "knows two statuses only": _fault(KnowsTwoStatuses, ""),
    "writes each value twice": _fault(WritesTwice, "has step 1 twice"),
}
