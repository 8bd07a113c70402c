"""Report page: HTML, style and script in one file that loads no other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from d9d_core.errors import JobError, PluginError
from d9d_engine.launch.startup import FILE as STARTUP

from d9d_reports.report import facts, summary
from d9d_reports.report.markup import folded, read_facts
from d9d_reports.report.series import Chart, series_charts
from d9d_reports.report.tables import table_charts
from d9d_reports.report.timeline import timeline_charts
from d9d_reports.runs.record import RunRecord

#: Policy of the page for the browser: it loads nothing from other places. Texts of a run are untrusted; they are
#: escaped, because the policy allows the page's own inline scripts.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
:root{color-scheme:light dark;--text:#1c2733;--weak:#55616e;--line:#dde3e9;--back:#f6f8fa;--card:#fff;--bar:#3f7fd0;
--good:#1d7a43;--bad:#b3261e;--badback:#fdecea}
@media(prefers-color-scheme:dark){:root{--text:#e3e9ef;--weak:#9dabb8;--line:#2d3844;--back:#12181f;--card:#1a222b;
--good:#5cc98a;--bad:#ff9d94;--badback:#3a1f1f}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:16px;background:var(--back);color:var(--text);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.2rem 0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:1.4rem 0 .5rem}
h3{font-size:.92rem;margin:.1rem .2rem;font-weight:600;overflow-wrap:anywhere}
p{margin:.3rem 0 .6rem}.weak,.note{color:var(--weak);overflow-wrap:anywhere}.note{font-size:.85rem;margin:.2rem}
.status{font-size:.85rem;font-weight:600;border:1px solid;border-radius:1em;padding:1px 10px;vertical-align:middle;
color:var(--weak)}.finished{color:var(--good)}.failed,.damaged{color:var(--bad)}
.error{background:var(--badback);border:1px solid var(--bad);border-radius:8px;padding:8px 12px;margin:.6rem 0;
overflow-wrap:anywhere}
.grid{display:grid;grid-template-columns:minmax(0,1fr);gap:12px}
@media(min-width:860px){.grid{grid-template-columns:repeat(2,minmax(0,1fr))}.grid>.full{grid-column:1/-1}}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:12px;margin:12px 0}
.tile{padding:8px 12px;font-size:.85rem}.value{font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 12px;min-width:0}
body>.card{margin-top:12px}body>h2+.card{margin-top:0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem}
th,td{text-align:left;vertical-align:top;padding:3px 14px 3px 2px;border-bottom:1px solid var(--line)}
tbody tr:last-child>*{border-bottom:0}
th{font-weight:600;white-space:nowrap}
td{max-width:32rem;overflow-wrap:break-word;font-variant-numeric:tabular-nums;min-width:4rem}
.pairs{width:100%}.pairs th{width:1%}.pairs td{max-width:none;overflow-wrap:anywhere}.pairs th{color:var(--weak)}
.pairs th{padding-right:20px}
@media(max-width:599px){.pairs th,.pairs td{display:block;width:auto;border:0;padding:0}.pairs td{padding-bottom:5px}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}}
.bar{width:160px;min-width:90px}.bar i{display:block;height:.8em;margin-top:.3em;min-width:1px;background:var(--bar);
border-radius:2px}
.command{display:block;font-size:.8rem;padding:6px 2px 2px;border-top:1px solid var(--line)}
.command span{display:inline-block;max-width:100%;overflow-wrap:anywhere}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem;margin:.3rem 0}
details{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:4px 12px;margin:12px 0}
details .card,details details{border:0;padding:4px 0}
summary{cursor:pointer;padding:4px 0;overflow-wrap:anywhere}
@media print{:root{color-scheme:light;--text:#1c2733;--weak:#55616e;--line:#dde3e9;--back:#fff;--card:#fff;
--good:#1d7a43;--bad:#b3261e;--badback:#fff}body{padding:0}.card,.tile,tr{break-inside:avoid}
.wide{overflow:visible}.grid{grid-template-columns:repeat(2,minmax(0,1fr))}.grid>.full{grid-column:1/-1}}
"""
_SCRIPT = """
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
function colours() {
  const style = getComputedStyle(document.documentElement), paper = {"--text": "#1c2733", "--line": "#dde3e9"};
  const of = name => printing ? paper[name] : style.getPropertyValue(name).trim();
  const axis = {gridcolor: of("--line"), linecolor: of("--line"), zeroline: false, automargin: true};
  return {axis, text: of("--text")};
}
function draw() {
  const {axis, text} = colours(), narrow = innerWidth < 600;
  let drawn = 0;
  charts.forEach((chart, number) => {
    const place = document.getElementById("chart-" + number);
    if (place.closest("details:not([open])")) return;  // drawn when the section opens, because it has no width yet
    const layout = {
      ...chart.layout, height: chart.height, autosize: true, font: {color: text, size: 12},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      margin: {l: 48, r: 12, t: 12, b: 40}, legend: {orientation: "h", x: 0, y: 1, yanchor: "bottom"},
      dragmode: narrow ? false : "zoom",
      xaxis: {...axis, ...chart.layout.xaxis}, yaxis: {...axis, ...chart.layout.yaxis},
    };
    const options = {responsive: true, displaylogo: false, displayModeBar: false};
    Plotly.react(place, chart.traces, layout, options);
    drawn += 1;
  });
  document.body.dataset.drawn = drawn;
}
draw();
dark.addEventListener("change", draw);
document.querySelectorAll("details").forEach(section => section.addEventListener("toggle", draw));
addEventListener("beforeprint", () => {
  printing = true;
  document.body.style.maxWidth = "700px";  // as wide as paper, so that charts are drawn to fit
  document.querySelectorAll("details").forEach(section => { section.open = true; });
  draw();
});
addEventListener("afterprint", () => { printing = false; document.body.style.maxWidth = ""; draw(); });
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
    groups = [
        ("Curves", "", series_charts(runs)),
        ("Tables", "heat maps of logged tables", table_charts(directories)),
        ("Pipeline", "one step of each rank", timeline_charts(directories)),
    ]
    several = len(runs) > 1
    names = " and ".join(runs) if len(runs) < 4 else f"{len(runs)} runs"
    made = datetime.now(UTC) if made is None else made
    body = [_head(names, runs), _section("", summary.trained(runs))]
    if several:
        body += [
            _section("Results", summary.results(runs)),
            _section("Differences of the jobs", facts.differences(runs)),
        ]
    else:
        body += [f'<div class="tiles">{summary.tiles(record)}</div>' for record in runs.values()]
    cards = _Cards()
    first = groups[0][2][:1]
    body += [cards.add(chart, full=True) for chart in first]
    plugins = {name: text for name, record in runs.items() if (text := facts.used_plugins(record))}
    if not several:
        body += [_section("Plugins of the job", text) for text in plugins.values()]
    for title, says, charts in groups:
        if rest := [chart for chart in charts if chart not in first]:
            grid = "".join(cards.add(chart, full=title == "Pipeline") for chart in rest)
            body.append(folded(title, says or _listed(rest), f'<div class="grid">{grid}</div>'))
    for name, record in runs.items():
        about = "\n".join(_about(record, plugins.get(name, "") if several else ""))
        body.append(folded(name, "plugins, layout, start-up, environment, job", about) if several else about)
    body.append(f'<p class="note">Made by d9d report, {made:%Y-%m-%d %H:%M} UTC.</p>')
    return _document(names, "\n".join(body), cards.charts)


def _head(names: str, runs: Mapping[str, RunRecord]) -> str:
    several = len(runs) > 1
    status = "" if several else "".join(f' <span class="status {r.status}">{r.status}</span>' for r in runs.values())
    lines = [f"<h1>{escape(names)}{status}</h1>"]
    lines += [f'<p class="weak">{text}</p>' for name, run in runs.items() if (text := _description(name, run, several))]
    for name, run in runs.items():
        if text := summary.failure(run):
            lines.append(
                f'<p class="error" role="alert">{escape(f"{name} failed" if several else "failed")}: {escape(text)}</p>'
            )
    return "\n".join(lines)


def _description(name: str, record: RunRecord, several: bool) -> str:
    section = record.job.get("run")
    text = section.get("description") if isinstance(section, Mapping) else None
    parts = [f"{name}: {text}" if several and text else text or "", str(record.directory) if not several else ""]
    if not record.lines:
        parts.append(f"{name} has logged nothing yet")
    return "<br>".join(escape(str(part)) for part in parts if part)


def _about(record: RunRecord, plugins: str) -> list[str]:
    job, environment = record.job, read_facts(record.directory / STARTUP)
    seconds = environment.get("wall")
    sections = [
        ("Plugins", "", plugins),
        ("Layout", "mesh, strategies, batch, precision, kernels", facts.layout(record)),
        ("Data", "all facts", facts.data(record)),
        ("Last start", f"ready after {seconds:.1f} s" if isinstance(seconds, float) else "", facts.start_up(record)),
        ("Environment", "versions and device", facts.environment(record)),
        ("Job", "job.yaml, all defaults filled in", facts.job(record) if job else ""),
    ]
    return [folded(title, says, content) for title, says, content in sections if content]


def _listed(charts: list[Chart]) -> str:
    names = [chart.title for chart in charts]
    return " · ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _section(title: str, content: str) -> str:
    heading = f"<h2>{title}</h2>" if title else ""
    return f'{heading}<div class="card">{content}</div>'


class _Cards:
    """Cards of charts, numbered in the order of the page."""

    def __init__(self) -> None:
        self.charts: list[Chart] = []

    def add(self, chart: Chart, full: bool) -> str:
        """Make the card of a chart; a chart without traces has a note only."""
        note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
        place = f'<div id="chart-{len(self.charts)}"></div>' if chart.traces else ""
        if chart.traces:
            self.charts.append(chart)
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
