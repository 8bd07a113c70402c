"""HTML tables about runs: key values, layout, data, start-up, plugins, environment, job, differences between jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from d9d_core.job_file.reading import write_yaml
from d9d_core.untrusted import parse_json, read_regular
from d9d_engine.launch.startup import FILE as STARTUP
from d9d_engine.run.directory import PLUGINS
from d9d_weights.model_card.card import fact_rows

from d9d_reports.runs.differences import differing, shown
from d9d_reports.runs.record import RunRecord

#: Sections of a job about its layout and numerics.
_LAYOUT = ("device", "mesh", "parallel", "pipeline", "batch", "precision", "peft", "kernels")


def table(rows: Iterable[Sequence[object]], titles: Sequence[str] = ()) -> str:
    """Make an HTML table of escaped texts; the first cell of a row is its title. Empty without rows."""
    head = f"<thead><tr>{''.join(f'<th>{escape(title)}</th>' for title in titles)}</tr></thead>" if titles else ""
    lines = [[escape(str(cell)) for cell in row] for row in rows]
    if not lines:
        return ""
    body = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in lines)
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def overview(runs: Mapping[str, RunRecord]) -> str:
    """Make a table of key values, with a column per run."""
    rows: dict[str, list[str]] = {
        "status": [record.status for record in runs.values()],
        "steps": [f"{record.step:,}" + (f" of {record.total:,}" if record.total else "") for record in runs.values()],
        "loss": [_number(record.last("loss")) for record in runs.values()],
        "best loss": [_number(record.best("loss")) for record in runs.values()],
        "evaluation": [_number(record.last("eval/loss")) for record in runs.values()],
        "best evaluation": [_number(record.best("eval/loss")) for record in runs.values()],
        "tokens": [_number(record.last("tokens")) for record in runs.values()],
        "tokens/s": [_number(record.last("tokens_per_second")) for record in runs.values()],
        "MFU": [_share(record.last("mfu")) for record in runs.values()],
        "memory, GiB": [_number(_memory(record)) for record in runs.values()],
        "trained": [_duration(record.seconds) for record in runs.values()],
        "last start": [f"{at:%Y-%m-%d %H:%M} UTC" if (at := record.started) else "" for record in runs.values()],
        "newest checkpoint": [f"step {record.saved:,}" if record.saved else "" for record in runs.values()],
        "error": [(record.error if record.status == "failed" else None) or "" for record in runs.values()],
    }
    kept = [(name, *values) for name, values in rows.items() if any(values)]
    return table(kept, ("", *runs) if len(runs) > 1 else ())


def differences(runs: Mapping[str, RunRecord]) -> str:
    """Make a table of the job fields in which runs differ, with a column per run."""
    fields = differing([record.job for record in runs.values()])
    if not fields:
        return "<p>The jobs are the same.</p>"
    return table(
        [(name, *("" if v is None else shown(v) for v in values)) for name, values in fields.items()], ("", *runs)
    )


def layout(record: RunRecord) -> str:
    """Make a table of a job's mesh, strategies and other settings of layout and numerics."""
    rows = []
    for name in _LAYOUT:
        value = record.job.get(name)
        if name == "mesh" and isinstance(value, Mapping):
            rows.append((name, "  ".join(f"{axis} {size}" for axis, size in value.items())))
        elif isinstance(value, list):
            rows += [(name if not at else "", _entry(entry)) for at, entry in enumerate(value)]
        elif value not in (None, {}):
            rows.append((name, _entry(value)))
    processes = _read(record.directory / STARTUP).get("processes")
    return table([*rows, *([("processes", processes)] if isinstance(processes, int) else [])])


def start_up(record: RunRecord) -> str:
    """Make a table of the phases of the last start, with bars; empty if none are recorded."""
    phases = [
        (str(phase.get("name")), float(phase["wall"]))
        for phase in _listed(_read(record.directory / STARTUP).get("phases"))
        if isinstance(phase.get("wall"), int | float)
    ]
    longest = max((seconds for _, seconds in phases), default=0.0) or 1.0
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{seconds:.2f} s</td>"
        f'<td class="bar"><i style="width:{min(max(seconds / longest, 0), 1):.1%}"></i></td></tr>'
        for name, seconds in [*phases]
    )
    total = f"<tr><th>all</th><td>{sum(seconds for _, seconds in phases):.2f} s</td><td></td></tr>"
    return f'<div class="wide"><table>{rows}{total}</table></div>' if phases else ""


def data(record: RunRecord) -> str:
    """Make a table of the facts of the data at the last start; empty if none are recorded."""
    found = _read(record.directory / STARTUP).get("data")
    return table(fact_rows(found)) if isinstance(found, Mapping) else ""


def plugins(record: RunRecord) -> str:
    """Make a table of the run's plugins; empty if none are recorded."""
    found = _read(record.directory / PLUGINS).get("plugins")
    rows = [
        (
            name,
            facts.get("version") or "",
            "editable" if facts.get("editable") else "",
            str(facts.get("sha256") or "")[:12],
        )
        for name, facts in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(facts, Mapping)
    ]
    return table(rows, ("plugin", "version", "", "SHA-256"))


def environment(record: RunRecord) -> str:
    """Make a table of versions and device of the last start; empty if none are recorded."""
    found = _read(record.directory / STARTUP).get("environment")
    return table(found.items()) if isinstance(found, Mapping) else ""


def job(record: RunRecord) -> str:
    """Make a collapsed section with the job file, all defaults filled in."""
    text = write_yaml(json.loads(json.dumps(record.job, default=str)), allow_unicode=True)
    return f"<details><summary>job.yaml, all defaults filled in</summary><pre>{escape(text)}</pre></details>"


def _read(path: Path) -> Mapping[str, Any]:
    """Read a JSON file of a run; empty if the file is missing or damaged."""
    try:
        values = parse_json(read_regular(path, links="near"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _listed(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _entry(value: Any) -> str:
    """Format a value of a job in one line, without unset fields."""
    if not isinstance(value, Mapping):
        return shown(value)
    fields = {name: field for name, field in value.items() if field not in (None, [], {}) and name != "name"}
    text = ", ".join(f"{name} {shown(field)}" for name, field in fields.items())
    return "  ".join(filter(None, (str(value.get("name", "")), text)))


def _memory(record: RunRecord) -> float | None:
    found = (record.last(f"memory/{kind}_gib") for kind in ("reserved", "allocated", "resident"))
    return next((value for value in found if value is not None), None)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
