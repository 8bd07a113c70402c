"""Layouts of one job on the GPUs of one machine: speed relative to one GPU, memory, and predictions of both.

    python tools/bench/layouts.py                                      # 2 GPUs: data, tensor, context, expert, pipeline
    python tools/bench/layouts.py --rows long --only 131072 --seconds 200
    python tools/bench/layouts.py --tiny                               # tiny models on the CPU: tries the tool

Rows with the same number of ranks share their processes, one job after the other; if the processes die, or wait for
each other for too long, the next row begins in new ones. Communication is the time of a step in which communication
kernels run; exposed is the part of this time in which no other kernel runs. A row's ``sixth step`` counts from the
launch of its processes: in the first row, it is the time that a user waits.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import records
from layout_rows import ROWS
from rank_processes import answers_of
from rows import Row

#: Key that identifies results of this benchmark.
KIND = "layouts"
MARKS = ("<!-- layouts: written by tools/bench/layouts.py -->", "<!-- end of layouts -->")
NONE_YET = "No layout has been measured by this command yet."
_HEAD = (
    "job", "tokens/s of a GPU", "times one GPU's", "ms", "predicted", "peak GiB", "predicted", "communication, ms",
    "exposed",
)  # fmt: skip


def main() -> None:
    """Measure, print, and write the result."""
    options = _options()
    rows = [row for row in ROWS[options.rows] if not options.only or any(text in row.name for text in options.only)]
    rows = [row for row in rows if options.ranks in (None, row.ranks)]
    page = options.folder / "README.md" if options.folder else None
    if not options.tables:
        before = [answer for file in options.beside for answer in json.loads(file.read_text(encoding="utf-8"))[KIND]]
        result = measure(rows, options.gpu, options.seconds, options.table or f"layouts-{options.rows}", before)
        print(text_of([result]))
        if options.folder:
            print(f"written: {records.write(result, options.folder)}", flush=True)
    if page and page.exists():
        filled = records.fill(page.read_text(encoding="utf-8"), text_of(records.read(options.folder, KIND)), MARKS)
        page.write_text(filled, encoding="utf-8")


def measure(
    rows: Sequence[Row], gpu: str, seconds: float | None, table: str, before: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """All measurements, as JSON values. Rows with most processes come first, as the first row compiles kernels.

    Args:
        rows: rows to measure.
        gpu: name of the GPU whose rates the predictions use.
        seconds: limit for the whole measurement.
        table: name of the table.
        before: answers of earlier calls on the same machine; they join the table.
    """
    start = time.perf_counter()
    found: list[dict[str, Any]] = []
    hardware: dict[str, Any] = {}
    left = sorted(rows, key=_processes)
    with tempfile.TemporaryDirectory() as directory:
        while left:
            now = [row for row in left if _processes(row) == _processes(left[0])]
            budget = None if seconds is None else seconds - (time.perf_counter() - start)
            if budget is not None and budget <= 0:
                print(f"no time for the last {len(left)} rows", flush=True)
                break
            questions = [{"name": row.name, "row": asdict(row)} for row in now]
            answers = answers_of("layout_worker.py", questions, now[0].ranks, budget, Path(directory), [gpu])
            hardware = answers[-1]["hardware"] if answers else hardware
            found += [{"row": asdict(row), **answer} for row, answer in zip(now, answers, strict=False)]
            # Without an answer, the time limit was reached.
            left = left[len(answers) :] if answers else left[len(now) :]
    found += map(dict, before)
    for one in found:
        one.pop("hardware", None)
        base = _alone(one, found)
        if base and "seconds" in one:
            one["times_alone"] = one["tokens_per_second"] / base["tokens_per_second"]
    return {
        "table": table, "taken": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": " ".join(["python tools/bench/layouts.py", *sys.argv[1:]]),
        "commit": records.commit(), "hardware": hardware, "gpu": gpu, KIND: found,
    }  # fmt: skip


def _processes(row: Row) -> tuple[bool, bool, int]:
    """Key of the rows that share processes; rows with pipelines set CUDA's variables as their jobs do, see `begin`."""
    return "pp" in dict(row.mesh), row.only_transfers, -row.ranks


def _alone(one: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Answer of the same job on one GPU: with as many tokens per GPU or, if there is none, as many samples."""
    row = Row.from_json(one["row"])
    if row.ranks == 1:
        return None
    whole = replace(row, mesh=(), parallel=(), schedule=None, microbatch=None)
    samples = row.samples * row.data_parallel
    bases = [replace(whole, samples=count) for count in (samples // row.ranks, samples)]
    known = {answer["name"]: answer for answer in found if "seconds" in answer}
    return next((known[base.name] for base in bases if base.name in known), None)


def text_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Tables of results for the page."""
    return "\n\n".join(map(_table, results)) if results else NONE_YET


def _table(result: Mapping[str, Any]) -> str:
    title = f"### {result['table']}: {result['hardware'].get('device', 'not measured')}"
    lines = records.table(_HEAD, [_line(answer) for answer in result[KIND]])
    first = [one for one in result[KIND] if "sixth_step" in one][:1]
    waits = [f"Sixth step of `{one['name']}` {one['sixth_step']:.0f} s after the launch." for one in first]
    return "\n\n".join([title, records.origin(result), "\n".join(lines), *waits])


def _line(answer: Mapping[str, Any]) -> list[str]:
    name = f"`{answer['name']}`"
    if "failed" in answer:
        return [name, answer["failed"], *[""] * (len(_HEAD) - 2)]
    ahead = answer["predicted"]
    # Predictions treat a sample as one document: right for memory, but not for the time of attention.
    soon = None if answer["row"]["document"] else ahead.get("seconds")

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    return [
        name,
        number(answer["tokens_per_second"], 0),
        number(answer.get("times_alone"), 3),
        number(1e3 * answer["seconds"], 1),
        number(None if soon is None else 1e3 * soon, 0),
        number(answer.get("peak_gib"), 1),
        number(ahead.get("allocated_gib"), 1),
        number(answer.get("communication_ms"), 1),
        number(answer.get("exposed_ms"), 1),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Layouts of one job on the GPUs of one machine.")
    parser.add_argument("--rows", choices=[name for name in ROWS if name != "tiny"], default="scaling")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only rows with one of these in their names")
    parser.add_argument("--ranks", type=int, metavar="N", help="only rows of so many processes")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="FILE", help="results of this machine that join the table"
    )
    parser.add_argument("--seconds", type=float, help="end after so long, with what there is")
    parser.add_argument("--gpu", default="h200", metavar="NAME|FILE", help="rates of predictions, as of d9d plan")
    parser.add_argument("--table", help="name of the table; by default the name of the rows")
    parser.add_argument("--folder", type=Path, help="write the result here, as JSON, and the tables into its page")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too: tries the tool")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the results that are there")
    options = parser.parse_args()
    if options.tiny:
        options.rows = "tiny"
    return options


if __name__ == "__main__":
    main()
