"""Report page: HTML, style and script in one file that loads no other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from d9d_core.errors import JobError, PluginError

from d9d_reports.report import facts
from d9d_reports.report.series import Chart, series_charts
from d9d_reports.report.tables import table_charts
from d9d_reports.report.timeline import timeline_charts
from d9d_reports.runs.record import RunRecord

#: Untrusted texts of a run can neither run code nor load files in the browser.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
:root{color-scheme:light dark;--text:#1c2733;--weak:#5b6875;--line:#dde3e9;--back:#f6f8fa;--card:#fff;--bar:#3f7fd0}
@media(prefers-color-scheme:dark){:root{--text:#e3e9ef;--weak:#97a4b1;--line:#2d3844;--back:#12181f;--card:#1a222b}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:16px;background:var(--back);color:var(--text);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.2rem 0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:1.6rem 0 .5rem}
h3{font-size:.92rem;margin:.1rem .2rem;font-weight:600;overflow-wrap:anywhere}
p{margin:.3rem 0}.weak,.note{color:var(--weak);overflow-wrap:anywhere}.note{font-size:.85rem;margin:.2rem}
.grid{display:grid;grid-template-columns:minmax(0,1fr);gap:12px}
@media(min-width:860px){.grid{grid-template-columns:repeat(2,minmax(0,1fr))}.grid>.full{grid-column:1/-1}}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px;min-width:0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem}
th,td{text-align:left;vertical-align:top;padding:3px 14px 3px 2px;border-bottom:1px solid var(--line)}
th{font-weight:600;white-space:nowrap}
td{max-width:26rem;overflow-wrap:break-word;font-variant-numeric:tabular-nums;min-width:4rem}
.bar{width:160px;min-width:90px}.bar i{display:block;height:.8em;margin-top:.3em;min-width:1px;background:var(--bar);
border-radius:2px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem}summary{cursor:pointer;padding:4px 0}
"""
_SCRIPT = """
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
function colours() {
  const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
  const axis = {gridcolor: of("--line"), linecolor: of("--line"), zeroline: false, automargin: true};
  return {axis, text: of("--text")};
}
function draw() {
  const {axis, text} = colours(), narrow = innerWidth < 600;
  charts.forEach((chart, number) => {
    const layout = {
      ...chart.layout, height: chart.height, autosize: true, font: {color: text, size: 12},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      margin: {l: 48, r: 12, t: 12, b: 40}, legend: {orientation: "h", x: 0, y: 1, yanchor: "bottom"},
      dragmode: narrow ? false : "zoom",
      xaxis: {...axis, ...chart.layout.xaxis}, yaxis: {...axis, ...chart.layout.yaxis},
    };
    const options = {responsive: true, displaylogo: false, displayModeBar: false};
    Plotly.react(document.getElementById("chart-" + number), chart.traces, layout, options);
  });
  document.body.dataset.drawn = charts.length;
}
draw();
dark.addEventListener("change", draw);
"""


def report_page(runs: Mapping[str, RunRecord], made: datetime | None = None) -> str:
    """Make the HTML page about some runs.

    Args:
        runs: shown name -> run.
        made: time shown on the page; by default the current time.

    Raises:
        JobError: no run has logged values.
        PluginError: plotly is not installed.
    """
    if not any(record.lines for record in runs.values()):
        where = ", ".join(str(record.directory) for record in runs.values())
        raise JobError(
            f"{where}: no logged values yet: metrics.jsonl is missing or empty; the tracker jsonl writes it from the "
            "first logged step on (trackers: [console, jsonl], which is the default)"
        )
    directories = {name: record.directory for name, record in runs.items()}
    figures = [
        ("Curves", series_charts(runs)),
        ("Tables", table_charts(directories)),
        ("Pipeline", timeline_charts(directories)),
    ]
    charts = [chart for _, group in figures for chart in group if chart.traces]
    several = len(runs) > 1
    names = " and ".join(runs) if len(runs) < 4 else f"{len(runs)} runs"
    made = datetime.now(UTC) if made is None else made
    body = [f"<h1>{escape(names)}</h1>"]
    body += [f'<p class="weak">{_description(name, run, several)}</p>' for name, run in runs.items()]
    body += [_section("", facts.overview(runs))]
    if several:
        body += [_section("Differences of the jobs", facts.differences(runs))]
    number = 0
    for title, group in figures:
        if group:
            body += [f"<h2>{title}</h2>", '<div class="grid">']
            for chart in group:
                body.append(_card(chart, number, full=not number or title == "Pipeline"))
                number += bool(chart.traces)
            body.append("</div>")
    body.append(f"<h2>About the run{'s' if several else ''}</h2>")
    for name, record in runs.items():
        about = f'<div class="grid">{"".join(_about(record))}</div>'
        body.append(f"<details><summary>{escape(name)}</summary>{about}</details>" if several else about)
    body.append(f'<p class="note">Made by d9d report, {made:%Y-%m-%d %H:%M} UTC.</p>')
    return _document(names, "\n".join(body), charts)


def _description(name: str, record: RunRecord, several: bool) -> str:
    section = record.job.get("run")
    text = section.get("description") if isinstance(section, Mapping) else None
    parts = [f"{name}: {text}" if several and text else text or "", str(record.directory) if not several else ""]
    if not record.lines:
        parts.append(f"{name} has logged nothing yet")
    return "<br>".join(escape(str(part)) for part in parts if part)


def _about(record: RunRecord) -> list[str]:
    sections = {
        "Layout": facts.layout(record),
        "Data": facts.data(record),
        "Last start": facts.start_up(record),
        "Environment": facts.environment(record),
        "Plugins": facts.plugins(record),
        "Job": facts.job(record) if record.job else "",
    }
    return [
        f'<div class="card{" full" if title == "Job" else ""}"><h3>{title}</h3>{content}</div>'
        for title, content in sections.items()
        if content
    ]


def _section(title: str, content: str) -> str:
    heading = f"<h2>{title}</h2>" if title else ""
    return f'{heading}<div class="card">{content}</div>'


def _card(chart: Chart, number: int, full: bool) -> str:
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    place = f'<div id="chart-{number}"></div>' if chart.traces else ""
    return f'<div class="card{" full" if full else ""}"><h3>{escape(chart.title)}</h3>{place}{note}</div>'


def _document(title: str, body: str, charts: list[Chart]) -> str:
    data = [{"traces": c.traces, "layout": c.layout, "height": c.height} for c in charts]
    # Escape, as a text of a run could otherwise end the script element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
<script type="application/json" id="charts">{text}</script>
<script>{_plotly()}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise PluginError(
            f"reports need plotly ({reason}); install it with: pip install 'd9d-reports[plots]'"
        ) from error
    return str(get_plotlyjs())


def write_report(runs: Mapping[str, RunRecord], path: Path) -> None:
    """Write the page about some runs; see :func:`report_page`."""
    from d9d_weights.files.atomic import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, report_page(runs))
