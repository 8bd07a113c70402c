"""Costs of d9d itself on a CPU, compared with an earlier commit.

    python tools/bench/cpu.py                              this commit alone
    python tools/bench/cpu.py --against HEAD~1             and the one before, in turns
    python tools/bench/cpu.py --parts start config --rounds 9 --against main
    python tools/bench/cpu.py --tables                     only the table of benchmarks/README.md, from its files

The other commit gets a worktree and an environment of its own, in a temporary directory, by ``git worktree`` and ``uv
sync``; both are removed when the measurement ends. This commit runs in the environment that starts the bench. Each
round measures a part on both sides, each first in every other round, in processes of their own with one thread; the
ratio of a round is this commit's time over the other's. Fewer than five rounds say little on a machine that does other
things. The result goes into ``benchmarks/`` and, from there, into its page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import records
from cpu_parts import PARTS, QUICKSTART, Seconds

HERE = Path(__file__).parent
#: Key that identifies results of this benchmark.
KIND = "cpu"
MARKS = ("<!-- cpu: written by tools/bench/cpu.py -->", "<!-- end of cpu -->")
NONE_YET = "Nothing has been measured by this command yet."
START = "start"
#: Commands to measure as whole processes.
COMMANDS = {"d9d --help": ("--help",), "d9d check JOB": ("check", str(QUICKSTART))}
Ask = Callable[[str, str], Seconds]


def main() -> None:
    """Measure, print, and write the result."""
    options = _options()
    if not options.tables:
        result = measure(options)
        print(text_of([result]))
        _say(f"written: {records.write(result, options.folder)}")
    page = options.folder / "README.md"
    if page.exists():
        filled = records.fill(page.read_text(encoding="utf-8"), text_of(records.read(options.folder, KIND)), MARKS)
        page.write_text(filled, encoding="utf-8")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements, as JSON values."""
    pythons = [sys.executable]
    against = None
    with tempfile.TemporaryDirectory(prefix="d9d-cpu-") as place:
        if options.against is None:
            found = rounds(pythons, options.parts, options.rounds, ask, _say)
        else:
            with revision(options.against, Path(place)) as (python, against):
                found = rounds([*pythons, python], options.parts, options.rounds, ask, _say)
    return {
        "table": "cpu",
        "taken": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": " ".join(["python tools/bench/cpu.py", *sys.argv[1:]]),
        "commit": records.commit(),
        "against": against,
        "hardware": records.hardware(),
        KIND: {name: summary(seconds) for name, seconds in found.items()},
    }


def rounds(
    pythons: Sequence[str], parts: Sequence[str], count: int, asked: Ask, say: Callable[[str], None]
) -> dict[str, list[list[float]]]:
    """Seconds of each measurement: of each side, round by round.

    Args:
        pythons: interpreters of the sides; this commit's is the first.
        parts: names of the measurements.
        count: number of rounds; an additional first round writes bytecode and fills caches.
        asked: gives the seconds of a part, by an interpreter.
        say: prints a line.
    """
    found: dict[str, list[list[float]]] = {}
    for number in range(-1, count):
        # Alternate the order, so that both sides come first equally often.
        order = list(enumerate(pythons))[:: 1 if number % 2 else -1]
        for part in parts:
            for side, python in order:
                for name, seconds in asked(part, python).items():
                    sides = found.setdefault(name, [[] for _ in pythons])
                    if number >= 0:
                        sides[side].append(seconds)
        say("warmed up" if number < 0 else f"round {number + 1} of {count}")
    return found


def ask(part: str, python: str) -> Seconds:
    """Seconds of a part by name, measured in separate processes.

    Raises:
        SystemExit: a process failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Bytecode is part of a start, so it must be enabled; and the other commit must not find this one's packages.
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    if part == START:
        found = {}
        for name, arguments in COMMANDS.items():
            begin = time.perf_counter()
            _run([python, "-m", "d9d_core", *arguments], environment)
            found[name] = time.perf_counter() - begin
        return found
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place, "answer.json")
        _run([python, str(HERE / "cpu_parts.py"), part, str(answer)], environment)
        seconds: Seconds = json.loads(answer.read_text(encoding="utf-8"))
        return seconds


def summary(sides: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Seconds of this commit and, if there is another side, its seconds and the ratios round by round."""
    ours = [round(value, 6) for value in sides[0]]
    if len(sides) == 1:
        return {"seconds": ours}
    ratios = [round(mine / theirs, 4) for mine, theirs in zip(*sides, strict=True)]
    return {"seconds": ours, "against": [round(value, 6) for value in sides[1]], "ratios": ratios}


@contextmanager
def revision(name: str, place: Path) -> Iterator[tuple[str, str]]:
    """Environment of another commit: path of its Python, and the commit's short name.

    Raises:
        SystemExit: there is no such commit, or it cannot be installed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    tree = place / "tree"
    short = _run(["git", "rev-parse", "--short=12", f"{name}^{{commit}}"], environment, records.ROOT).strip()
    _run(["git", "worktree", "add", "--quiet", "--detach", str(tree), short], environment, records.ROOT)
    try:
        _say(f"installing {short}")
        _run(["uv", "sync", "--quiet"], environment, tree)
        yield str(tree / ".venv" / "bin" / "python"), short
    finally:
        _run(["git", "worktree", "remove", "--force", str(tree)], environment, records.ROOT)


def text_of(results: Sequence[Mapping[str, Any]]) -> str:
    """All tables."""
    return "\n\n".join(map(_section, results)) or NONE_YET


def _section(result: Mapping[str, Any]) -> str:
    against = result["against"]
    lines = [f"### CPU: {result['hardware']['device']}", "", f"One thread; {records.origin(result)}.", ""]
    head = ["", "ms", *([f"ms at {against}", "ratio", "from", "to"] if against else [])]
    rows = []
    for name, found in result[KIND].items():
        row = [name, f"{1e3 * statistics.median(found['seconds']):,.2f}"]
        if against:
            ratios = found["ratios"]
            row.append(f"{1e3 * statistics.median(found['against']):,.2f}")
            row += [f"{value:.3f}" for value in (statistics.median(ratios), min(ratios), max(ratios))]
        rows.append(row)
    return "\n".join([*lines, *records.table(head, rows)])


def _run(command: Sequence[str], environment: Mapping[str, str], directory: Path | None = None) -> str:
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-8:])
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{last}")
    return done.stdout


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(START, *PARTS), default=(START, *PARTS))
    parser.add_argument("--against", metavar="REV", help="the other commit, such as HEAD~1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=records.BENCHMARKS, help="where the results are")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the results that are there")
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
