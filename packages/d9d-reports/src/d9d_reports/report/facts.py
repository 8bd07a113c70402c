"""HTML tables about runs: layout, data, start-up, plugins, environment, job, differences between jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from d9d_core.job_file.reading import write_yaml
from d9d_engine.launch.startup import FILE as STARTUP
from d9d_engine.run.directory import FACTS, PLUGINS
from d9d_weights.model_card.card import fact_rows

from d9d_reports.report.markup import read_facts, table
from d9d_reports.runs.differences import differing, shown
from d9d_reports.runs.record import RunRecord

#: Sections of a job about its layout and numerics.
_LAYOUT = ("device", "mesh", "parallel", "pipeline", "batch", "precision", "peft", "kernels")


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
    processes = read_facts(record.directory / STARTUP).get("processes")
    return table([*rows, *([("processes", processes)] if isinstance(processes, int) else [])])


def start_up(record: RunRecord) -> str:
    """Make a table of the phases of the last start, with bars; empty if none are recorded."""
    phases = [
        (str(phase.get("name")), float(phase["wall"]))
        for phase in _listed(read_facts(record.directory / STARTUP).get("phases"))
        if isinstance(phase.get("wall"), int | float)
    ]
    longest = max((seconds for _, seconds in phases), default=0.0) or 1.0
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{seconds:.2f} s</td>"
        f'<td class="bar"><i style="width:{min(max(seconds / longest, 0), 1):.1%}"></i></td></tr>'
        for name, seconds in phases
    )
    total = f"<tr><th>all</th><td>{sum(seconds for _, seconds in phases):.2f} s</td><td></td></tr>"
    return f'<div class="wide"><table>{rows}{total}</table></div>' if phases else ""


def data(record: RunRecord) -> str:
    """Make a table of the facts of the data at the last start; empty if none are recorded."""
    found = read_facts(record.directory / FACTS).get("data")
    return table(fact_rows(found)) if isinstance(found, Mapping) else ""


def used_plugins(record: RunRecord) -> str:
    """Make a table of the plugins whose components the job uses; empty if none are recorded.

    All installed plugins are shown for a run without ``facts.json``.
    """
    installed = read_facts(record.directory / PLUGINS).get("plugins")
    versions = installed if isinstance(installed, Mapping) else {}
    used = read_facts(record.directory / FACTS).get("plugins")
    rows = []
    for name, parts in (used if isinstance(used, Mapping) else dict.fromkeys(versions)).items():
        facts = versions.get(name)
        about = facts if isinstance(facts, Mapping) else {}
        texts = ", ".join(map(str, parts)) if isinstance(parts, list) else ""
        version = about.get("version") or str(about.get("sha256") or "")[:12]
        rows.append((name, texts, version + (", editable" if about.get("editable") else "")))
    return table(rows, ("plugin", "components in the job", "version"))


def environment(record: RunRecord) -> str:
    """Make a table of versions and device of the last start; empty if none are recorded."""
    found = read_facts(record.directory / STARTUP).get("environment")
    return table(found.items()) if isinstance(found, Mapping) else ""


def job(record: RunRecord) -> str:
    """Make the text of the job file, all defaults filled in."""
    text = write_yaml(json.loads(json.dumps(record.job, default=str)), allow_unicode=True)
    return f"<pre>{escape(text)}</pre>"


def _listed(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _entry(value: Any) -> str:
    """Format a value of a job in one line, without unset fields."""
    if not isinstance(value, Mapping):
        return shown(value)
    fields = {name: field for name, field in value.items() if field not in (None, [], {}) and name != "name"}
    text = ", ".join(f"{name} {shown(field)}" for name, field in fields.items())
    return "  ".join(filter(None, (str(value.get("name", "")), text)))
