"""Tables of runs on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from d9d_core.terminal.console import console_for
from rich.table import Table

from d9d_reports.runs.differences import differing, shown
from d9d_reports.runs.record import RunRecord
from d9d_reports.runs.sweep import Sweep


def list_table(records: Sequence[RunRecord]) -> None:
    """Print one line per run, with the job fields in which they differ."""
    fields = differing([record.job for record in records])
    failed = any(record.status == "failed" for record in records)
    titles = ("run", "status", "steps", "loss", "best", "eval", "started", "trained", *fields)
    table = _table(*titles, *(["error"] if failed else []))
    for number, record in enumerate(records):
        started = "" if record.started is None else f"{record.started.astimezone():%Y-%m-%d %H:%M}"
        table.add_row(
            record.name,
            record.status,
            *_progress(record),
            started,
            _duration(record.seconds),
            *(shown(values[number]) for values in fields.values()),
            *([record.error] if failed else []),
        )
    console_for().print(table)


def sweep_table(sweep: Sweep, records: Mapping[str, RunRecord]) -> None:
    """Print the ending of each run of a sweep."""
    table = _table("run", "status", "steps", "loss", "best", "eval", "error")
    for run in sweep.runs:
        record = records.get(run.name)
        progress = ("", "", "", "") if record is None else _progress(record)
        table.add_row(run.name, sweep.endings[run.name], *progress, sweep.errors.get(run.name, ""))
    console_for().print(table)


def comparison_table(records: Sequence[RunRecord], series: Sequence[str]) -> None:
    """Print the job fields in which runs differ, and the last (of losses, also the least) values of logged series."""
    table = _table("", *(record.name for record in records))
    for name, values in differing([record.job for record in records]).items():
        table.add_row(name, *map(shown, values))
    table.add_row("status", *(record.status for record in records))
    table.add_row("steps", *(str(record.step) for record in records))
    for name in series:
        table.add_row(name, *(_number(record.last(name)) for record in records))
        if "loss" in name:
            table.add_row(f"{name} (least)", *(_number(record.best(name)) for record in records))
    console_for().print(table)


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _progress(record: RunRecord) -> tuple[str, str, str, str]:
    steps = str(record.step) if record.total is None else f"{record.step}/{record.total}"
    return steps, _number(record.last("loss")), _number(record.best("loss")), _number(record.last("eval/loss"))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
