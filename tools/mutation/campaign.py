"""Mutation campaign: seeds single-line faults in copies of the sources, and counts the faults that tests notice.

    python tools/mutation/campaign.py map --map MAP.json.gz --jobs 16 --minutes 9
        Phase 1: run each test file once and record which lines each test runs. Again with the same file: go on.
    python tools/mutation/campaign.py run --map MAP.json.gz --out RUN.jsonl --count 300 --seed 0 --jobs 16 --minutes 9
        Phase 2: seed slips, run the tests that run the changed line. Again with the same file: go on.
    python tools/mutation/campaign.py report --out RUN.jsonl [--write]
        Print the table and the survivors; write them into docs/mutations.md, with the reasons of survivors.toml.

Needs only pytest and the dependencies of the tests; tests that already fail on unchanged sources do not count.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coverage_map import CoverageMap, Test, record, test_files
from mutation_report import report
from sandbox import MARKED, ROOT, Sandbox
from slips import Slip, chosen

_Task = TypeVar("_Task")
#: Time limit of a test, as a multiple of its recorded time, and the smallest limit in seconds.
PATIENCE, LEAST = 5.0, 45.0
#: Seconds between two writes of the map while it is recorded.
_BETWEEN_WRITES = 60.0


def main() -> None:
    """Run the phase named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("map", "run", "report"))
    parser.add_argument("--map", type=Path, default=Path("build/mutation/map.json.gz"))
    parser.add_argument("--out", type=Path, default=Path("build/mutation/run.jsonl"))
    parser.add_argument("--jobs", type=int, default=1, help="processes of pytest at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="when to stop; the next call goes on")
    parser.add_argument("--count", type=int, default=300, help="slips")
    parser.add_argument("--controls", type=int, default=16, help="runs without a slip, which have to pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests near, and of tests far, a slip")
    parser.add_argument("--only", default="", help="only test files or slips whose path contains this")
    parser.add_argument("--marked", default=MARKED, help="marker expression of the tests")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.phase == "map":
        record_map(options)
    elif options.phase == "run":
        run(options)
    else:
        report(options.out, options.write)


def record_map(options: argparse.Namespace) -> None:
    """Record the test files that the map lacks."""
    known, end = CoverageMap(options.map), _end(options)
    written = time.monotonic()

    def work(sandbox: Sandbox, file: str) -> tuple[str, dict[str, Any]]:
        return file, record(sandbox, file, end - time.monotonic())

    def done(found: tuple[str, dict[str, Any]]) -> None:
        nonlocal written
        file, recorded = found
        tests = recorded["tests"].values()
        bad = [name for name, test in recorded["tests"].items() if not test["passed"]]
        seconds = sum(test.get("seconds", 0) for test in tests)
        print(f"{file}: {len(tests)} tests, {seconds:.0f} s, status {recorded['status']}", *bad, flush=True)
        if recorded["status"] is not None:  # else the time was up, and the next call records the file
            known.files[file] = recorded
        if time.monotonic() - written > _BETWEEN_WRITES:  # a kill loses little
            known.write()
            written = time.monotonic()

    files = [file for file in test_files() if options.only in file and file not in known.files]
    try:
        _in_parallel(work, files, done, options, end)
    finally:
        known.write()
    print(f"{len(known.files)} of {len(test_files())} test files recorded")


def run(options: argparse.Namespace) -> None:
    """Seed the slips that the output lacks."""
    known, end = CoverageMap(options.map), _end(options)
    slips = [slip for slip in chosen(ROOT, options.count, options.seed) if options.only in slip.file]
    spacing = max(1, len(slips) // options.controls) if options.controls else len(slips) + 1
    controls = [dataclasses.replace(slip, kind="control", text=slip.old) for slip in slips[::spacing]]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    before = options.out.read_text("utf-8").splitlines() if options.out.exists() else []
    finished = {(row["key"], row["line"]) for row in map(json.loads, before)}
    # Sorted by hash, because slips of one member are adjacent and equally slow.
    todo = [slip for slip in [*slips, *controls[: options.controls]] if (slip.key, slip.line) not in finished]
    todo.sort(key=lambda slip: (hash_of(slip), slip.key))

    def work(sandbox: Sandbox, slip: Slip) -> dict[str, Any] | None:
        return meet(sandbox, slip, known.ordered(slip, options.budget), end)

    def done(row: dict[str, Any]) -> None:
        with options.out.open("a", encoding="utf-8") as output:
            output.write(json.dumps(row) + "\n")
        print(f"{row['verdict']:8} {row['seconds']:4.0f} s  {row['file']}:{row['line']} {row['change']}", flush=True)

    _in_parallel(work, todo, done, options, end)
    report(options.out, write=False)


def hash_of(slip: Slip) -> int:
    """Number that shuffles the order of slips, the same in all processes."""
    return sum((place + 1) * ord(letter) for place, letter in enumerate(slip.key)) * 7919 % 10007


def meet(
    sandbox: Sandbox, slip: Slip, tests: tuple[Sequence[Test], Sequence[Test]], end: float
) -> dict[str, Any] | None:
    """Run near and then far tests on the sources with a slip, until one fails; ``None`` if the time is up."""
    began = time.monotonic()
    row: dict[str, Any] = {"verdict": "survived" if any(tests) else "unreached", "by": None, "far": False}
    original = (ROOT / slip.file).read_bytes()
    with sandbox.changed(slip.file, slip.applied(original)):
        for far, group in enumerate(tests):
            if not group:
                continue
            plan = sandbox.directory / "plan.json"
            plan.write_text(json.dumps({test.name: max(LEAST, PATIENCE * test.seconds) for test in group}))
            now = plan.with_suffix(".now")
            now.unlink(missing_ok=True)
            limit = 2 * LEAST + PATIENCE * sum(test.seconds for test in group)
            files = list(dict.fromkeys(test.file for test in group))
            status, output = sandbox.pytest(files, {"D9D_MUTATION_PLAN": str(plan)}, min(limit, end - time.monotonic()))
            if time.monotonic() >= end:
                return None
            if status != 0 or " passed" not in output:  # a process may leave before its tests are done
                by = now.read_text() if now.exists() else "import"
                said = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "no report")
                row = {"verdict": "killed", "by": by, "far": bool(far), "status": status, "said": said[:300]}
                break
    return {
        "key": slip.key, "member": slip.member, "file": slip.file, "line": slip.line, "kind": slip.kind,
        "source": slip.source, "change": slip.change, **row, "tests": sum(map(len, tests)),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _in_parallel(
    work: Callable[[Sandbox, _Task], Any],
    tasks: Sequence[_Task],
    done: Callable[[Any], None],
    options: argparse.Namespace,
    end: float,
) -> None:
    """Process tasks in sandboxes; start none in the last 20 seconds, and report each result in this thread."""
    # A short path, because paths of sockets are limited.
    base = Path(tempfile.mkdtemp(prefix="m-", dir="/tmp"))
    free: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
    for number in range(options.jobs):
        free.put(Sandbox(base / str(number), options.marked))

    def one(task: _Task) -> Any:
        if time.monotonic() > end - 20:
            return None
        sandbox = free.get()
        try:
            return work(sandbox, task)
        finally:
            free.put(sandbox)

    try:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for future in concurrent.futures.as_completed([pool.submit(one, task) for task in tasks]):
                if future.result() is not None:
                    done(future.result())
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _end(options: argparse.Namespace) -> float:
    return time.monotonic() + 60 * float(options.minutes)


if __name__ == "__main__":
    main()
