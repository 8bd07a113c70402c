"""Tracker that writes to Weights & Biases."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import wandb
from d9d_core.errors import PluginError
from d9d_core.metric import Table
from d9d_core.tracker import Histogram, Picture, RunInfo
from d9d_core.types import State

from d9d_wandb.config import WandbConfig
from d9d_wandb.segments import Segment, find_segments, wait_until_settled

#: Seconds after which wandb's own process writes rows to its file, and longest wait of a flush in seconds.
_WRITTEN_AFTER, _PATIENCE = 0.2, 8.0
#: Series with the training step, because wandb's own step must not decrease from row to row.
STEP = "step"


class WandbTracker:
    """Tracker ``wandb``, which opens or resumes a run of Weights & Biases."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> WandbRun:
        """Start a run, or resume the run whose id is in ``state``.

        Raises:
            PluginError: the directory cannot be written; no user is logged in; W&B cannot be reached, or refuses the
                run; or the run no longer exists and ``lost_run`` is ``off``.
        """
        directory = self._config.dir or run.directory
        try:
            (directory / "wandb").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PluginError(
                f"{directory / 'wandb'} cannot be written ({error.strerror}); set dir of the tracker 'wandb' to a "
                "writable directory"
            ) from error
        try:
            found = None
            if run.resumed_step and state is not None:
                found = self._continued(run, directory, str(state["id"]))
            return found or WandbRun(self._init(run, directory, secrets.token_hex(4), "never"), 0, {}, {})
        except wandb.errors.Error as error:
            raise _failure(error) from error

    def _continued(self, run: RunInfo, directory: Path, run_id: str) -> WandbRun | None:
        """Open the run with the saved id and the last step of each series; ``None`` to start a new run instead."""
        offline = self._config.mode == "offline"
        paths = find_segments(directory, run_id)
        if offline and not paths:
            self._say_lost(f"the files of the wandb run '{run_id}' of this job are no longer in {directory / 'wandb'}")
            return None
        wait_until_settled(paths)
        try:
            # Offline, the server cannot be asked whether the run exists; a new file continues the row numbers.
            opened = self._init(run, directory, run_id, "allow" if offline else "must")
        except wandb.errors.UsageError as error:
            if "resume" not in str(error):
                raise
            self._say_lost(f"wandb no longer has the run '{run_id}' of this job")
            return None
        row, last, kinds = opened.step, dict[str, int](), dict[str, str]()
        if not paths:  # resumed on another machine, without the files
            last, kinds = _last_steps(opened.summary), _kinds(dict(opened.summary))
        for path in paths:
            for written in Segment(path).rows():
                row = max(row, int(written["_step"]) + 1)
                last |= {name: max(last.get(name, -1), int(written.get(STEP, -1))) for name in written}
                kinds |= _kinds(written)
        return WandbRun(opened, row, last, kinds)

    def _say_lost(self, text: str) -> None:
        if self._config.lost_run == "off":
            raise PluginError(f"{text}; set 'lost_run: new' of the tracker 'wandb' to go on in a new run")
        with suppress(OSError):
            print(f"warning: {text}; a new run replaces it", file=sys.stderr)  # noqa: T201

    def _init(self, run: RunInfo, directory: Path, run_id: str, resume: Literal["never", "allow", "must"]) -> wandb.Run:
        config = self._config
        settings = wandb.Settings(
            console="auto" if config.capture_terminal_logs else "off",
            silent=True,
            x_transaction_log_flush_interval=_WRITTEN_AFTER,
        )
        opened = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=[*run.tags, *config.tags],
            mode=config.mode,
            dir=str(directory),
            id=run_id,
            name=run.name,
            notes=run.description or None,
            config={**run.hparams, "job": run.config},
            # A resumed job may differ in fields that a resume allows to change.
            allow_val_change=True,
            resume=resume,
            reinit="create_new",
            force=config.mode == "online",  # without a login, raise an error instead of asking
            settings=settings,
        )
        opened.define_metric(STEP)
        opened.define_metric("*", step_metric=STEP, step_sync=False)
        return opened


class WandbRun:
    """Open run of the tracker ``wandb``.

    Args:
        run: wandb's run object.
        row: number of the next history row; after a resume not 0.
        last: last step of each series in wandb; this step and earlier ones are not written again.
        kinds: kind of the values of each series in wandb.
    """

    def __init__(self, run: wandb.Run, row: int, last: Mapping[str, int], kinds: Mapping[str, str]) -> None:
        self._run = run
        self._row = row
        self._last = dict(last)
        self._kinds = dict(kinds)
        self._open = True
        self._segment = Segment(Path(run.settings.sync_file))
        self._written = row - 1
        self._id = run.id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row with the series whose last step is earlier than this one."""
        self._write(step, values, "number")

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write histograms by their counts."""
        made = {name: wandb.Histogram(np_histogram=_bins(value)) for name, value in histograms.items()}
        self._write(step, made, "histogram")

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts unchanged."""
        self._write(step, texts, "text")

    def write_pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Write pictures."""
        self._write(step, {name: wandb.Image(picture.numpy()) for name, picture in pictures.items()}, "picture")

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Write tables as W&B tables."""
        self._write(step, {name: _table(table) for name, table in tables.items()}, "table")

    def write_files(self, step: int, files: Mapping[str, Path]) -> None:  # noqa: ARG002 - wandb numbers versions itself
        """Write each file as an artifact; a changed content makes a new version."""
        self._check()
        for name, path in files.items():
            artifact = wandb.Artifact(f"{self._id}-{re.sub(r'[^a-zA-Z0-9_.-]', '-', name)}", type="file")
            artifact.add_file(str(path))
            self._run.log_artifact(artifact)

    def flush(self) -> bool:
        """Wait until wandb's own process has written all rows to its file, where they survive if both processes die.

        Returns:
            Whether all rows were written within the time limit.
        """
        self._check()
        deadline = time.monotonic() + _PATIENCE
        while self._written < self._row - 1:
            if time.monotonic() > deadline:
                return False
            for row in self._segment.rows():
                self._written = int(row["_step"])
            if self._written < self._row - 1:
                time.sleep(_WRITTEN_AFTER / 5)
        return True

    def state(self) -> State:
        """Id of the run, for resuming."""
        return {"id": self._id}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """End the run; with exit code 1 if it failed."""
        if self._open:
            with suppress(Exception):  # without a flush, finish() may return before all rows are in the file
                self.flush()
            self._open = False
            self._run.finish(exit_code=int(status == "failed"))

    def _write(self, step: int, values: Mapping[str, Any], kind: str) -> None:
        self._check()
        columns = {self._column_of(name, kind): value for name, value in values.items()}
        new = {name: value for name, value in columns.items() if step > self._last.get(name, -1)}
        if new:
            self._run.log({**new, STEP: step}, step=self._row, commit=True)
            self._row += 1
            self._last |= dict.fromkeys(new, step)

    def _column_of(self, name: str, kind: str) -> str:
        """Column of a series; with a suffix if the column has values of another kind."""
        column = _column(name)
        return column if self._kinds.setdefault(column, kind) == kind else f"{column} ({kind})"

    def _check(self) -> None:
        if not self._open:
            raise ValueError("the run is closed")


def _failure(error: wandb.errors.Error) -> PluginError:
    """Make d9d's error about a run that wandb did not open."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    # Without credentials, wandb raises a UsageError, which only its text distinguishes.
    if isinstance(error, wandb.errors.AuthenticationError) or "API key" in reason:
        return PluginError(
            f"the tracker 'wandb' is not logged in to W&B: {reason}; run 'wandb login', or set WANDB_API_KEY to a "
            "valid key, or set 'mode: offline' of the tracker 'wandb'"
        )
    if isinstance(error, wandb.errors.CommError):
        return PluginError(
            f"the tracker 'wandb' gets no run from W&B: {reason}; check the network, WANDB_BASE_URL, and project and "
            "entity of the tracker 'wandb', or set its 'mode: offline' and run 'wandb sync' later"
        )
    return PluginError(
        f"the tracker 'wandb' cannot open a run: {reason}; change the fields of the tracker 'wandb' or the variables "
        "WANDB_* accordingly, or set its 'mode: offline'"
    )


def _column(name: str) -> str:
    # wandb reserves names with a leading underscore, such as `_step`, and silently drops other columns named so.
    return f"%5F{name[1:]}" if name.startswith("_") else str(name)


def _kinds(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _kind(value) for name, value in values.items()}


def _kind(value: Any) -> str:
    """Kind of a value that wandb has stored."""
    if isinstance(value, Mapping):
        kinds = {"histogram": "histogram", "image-file": "picture", "table-file": "table"}
        return kinds.get(str(value.get("_type")), "number")
    return "text" if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity") else "number"


def _bins(histogram: Histogram) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    counts = histogram.counts.numpy()
    return counts, np.linspace(float(histogram.low), float(histogram.high), len(counts) + 1)


def _table(table: Table) -> wandb.Table:
    rows, columns = table.values.shape
    names = table.rows or tuple(map(str, range(rows)))
    data = [[label, *row] for label, row in zip(names, table.values.tolist(), strict=True)]
    return wandb.Table(columns=[table.row, *(f"{table.column} {index}" for index in range(columns))], data=data)


def _last_steps(summary: Any) -> dict[str, int]:
    """Last step of each series: the run's last step for all, because the server's summary has no step per series."""
    names: Iterable[str] = summary.keys()
    step = summary.get(STEP)
    return {} if step is None else {name: int(step) for name in names if not name.startswith("_")}
