"""Runs commands on untrusted files, and prints a table of files x commands, with seconds and memory.

    uv run python tools/strangers_table.py --record strangers.jsonl
    uv run python tools/strangers_table.py --record strangers.jsonl --family adapter --only expression

Each command is a separate process in the directory of the files. It must refuse the file with an error line, or read
it: no code in the file may run, no control character may reach the terminal, there must be no traceback and no access
to private files, and time and memory must stay near those for the undamaged file. Exit status 1 if a cell violates
this. Cells in the record are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from d9d_core.untrusted import visible
from d9d_testing.processes import descendants_of
from strangers_files import FAMILIES, MARKS, SOUND, Sound, Work, is_read

#: Limits in seconds and MiB at which a command is killed.
MOST_SECONDS, MOST_MEMORY = 120.0, 6 << 10
#: Tolerated seconds and MiB in excess of the undamaged file.
SLACK_SECONDS, SLACK_MEMORY = 40.0, 1 << 10
_PAUSE = 0.02


@dataclass(frozen=True)
class Cell:
    """Result of one command on one file.

    Attributes:
        family: family of the file.
        file: damage of the file.
        command: name of the command.
        status: exit status; None if the command was killed.
        seconds: duration.
        memory: peak in MiB of all its processes together.
        verdict: ``read``, ``refused``, or the fault.
        said: last line of the error.
    """

    family: str
    file: str
    command: str
    status: int | None
    seconds: float
    memory: int
    verdict: str
    said: str

    @property
    def is_sound(self) -> bool:
        """Whether the command behaved correctly."""
        return self.verdict in ("read", "refused")


def run(command: list[str], directory: Path, out: Path) -> tuple[int | None, float, int, str]:
    """Run a command to its end; return exit status, seconds, peak memory in MiB, and output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("D9D_", "PYTHON"))}
    environ |= {"COLUMNS": "120", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(out)}
    peak, status = 0, None
    with (out / "said").open("wb") as said:
        began = time.monotonic()
        child = subprocess.Popen(
            command, cwd=directory, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        try:
            while time.monotonic() - began < MOST_SECONDS and peak < MOST_MEMORY:
                if (status := child.poll()) is not None:
                    break
                # getrusage's peak would include the memory of this process before exec.
                peak = max(
                    peak, _memory(child.pid, "VmHWM"), sum(map(_memory, [child.pid, *descendants_of(child.pid)]))
                )
                time.sleep(_PAUSE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        seconds = time.monotonic() - began
    return status, seconds, peak, (out / "said").read_bytes()[: 1 << 22].decode("utf-8", "replace")


def _memory(pid: int, field: str = "VmRSS") -> int:
    """Current memory of a process in MiB, or its peak with ``VmHWM``."""
    with suppress(OSError):
        found = re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) >> 10 if found else 0
    return 0


def judge(cell: Cell, text: str, work: Work, sound: Cell | None) -> str:
    """Verdict on a finished or killed command."""
    found = {
        "code ran": work.canary.exists(),
        "wrote a file of the user": work.victim.read_text() != MARKS,
        "read a file of the user": MARKS in text or any(MARKS.encode() in data for data in _written(work.out)),
        "no end": cell.status is None and cell.seconds >= MOST_SECONDS,
        "fills memory": cell.memory > SLACK_MEMORY + (sound.memory if sound else MOST_MEMORY - SLACK_MEMORY - 1),
        "slow": cell.seconds > SLACK_SECONDS + (sound.seconds if sound else MOST_SECONDS),
        "traceback": "Traceback (most recent" in text,
        "controls the terminal": visible(text.replace("\r\n", "\n")) != text,
        "killed": (cell.status or 0) not in (0, 1, 2),
        "long text": cell.file != SOUND and len(text) > 40_000,
        "no line of error": bool(cell.status) and ": " not in text,
    }  # fmt: skip
    faults = [name for name, is_so in found.items() if is_so]
    return ", ".join(faults) or ("refused" if cell.status else "read")


def _written(out: Path) -> Iterator[bytes]:
    for file in out.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 20:
            yield file.read_bytes()


def table(
    root: Path, families: Iterable[str], only: str = "", commands: str = "", record: Path | None = None, jobs: int = 1
) -> list[Cell]:
    """Run commands on files, undamaged ones first; return all cells, including the recorded ones."""
    lines = record.read_text().splitlines() if record and record.exists() else []
    cells = {(cell.family, cell.file, cell.command): cell for cell in (Cell(**json.loads(line)) for line in lines)}
    sound = Sound(root / "sound")
    numbers = itertools.count()

    def fill(key: tuple[str, str, str]) -> None:
        beside = cells.get((key[0], SOUND, key[2]))
        cells[key] = cell = _cell(Work(root / f"work-{next(numbers)}", sound), key, beside)
        if record:
            with record.open("a") as file:
                file.write(json.dumps(asdict(cell)) + "\n")

    for names in ([SOUND], None):
        wanted = [
            (family, name, command)
            for family in families
            for name in names or (name for name in FAMILIES[family][0] if only in name)
            for command in FAMILIES[family][1]
            if re.search(commands, command) and is_read(family, name, command)
        ]
        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(fill, [key for key in wanted if key not in cells]))
    return list(cells.values())


def _cell(work: Work, key: tuple[str, str, str], sound: Cell | None) -> Cell:
    family, name, command = key
    makers, commands = FAMILIES[family]
    work.make(family, makers.get(name))
    arguments = [str(Path(sys.executable).with_name("d9d")), *commands[command](work)]
    directory = work.place if work.place.is_dir() else work.place.parent
    status, seconds, memory, text = run(arguments, directory, work.out)
    errors = [line for line in text.splitlines() if line.startswith("error")] or text.splitlines()
    said = visible(errors[-1])[:200].replace(str(work.root), "") if errors else ""
    cell = Cell(family, name, command, status, round(seconds, 1), memory, "", said)
    made = Cell(**{**asdict(cell), "verdict": judge(cell, text, work, sound)})
    print(f"{family}: {name}: {command}: {status}, {seconds:.1f} s, {memory} MiB, {made.verdict}", file=sys.stderr)
    shutil.rmtree(work.root)
    return made


def markdown(cells: list[Cell]) -> str:
    """Table of cells, with seconds and MiB of the undamaged file in parentheses."""
    sound: Mapping[tuple[str, str], Cell] = {(c.family, c.command): c for c in cells if c.file == SOUND}
    rows = ["| file | command | status | seconds (sound) | MiB (sound) | verdict |", "|---|---|---|---|---|---|"]
    for cell in cells:
        beside: Any = sound.get((cell.family, cell.command), cell)
        status = "ended" if cell.status is None else cell.status
        rows.append(
            f"| {cell.family}: {cell.file} | {cell.command} | {status} | {cell.seconds} ({beside.seconds}) "
            f"| {cell.memory} ({beside.memory}) | {cell.verdict} |"
        )
    wrong = sum(not cell.is_sound for cell in cells)
    return "\n".join([*rows, "", f"{len(cells)} cells, {wrong} with a fault. {_CAPTION}"])


_CAPTION = (
    "Status 2 is a refusal. Seconds are of the whole process, of which importing torch takes 3 and transformers 3 more "
    "(`generate`); `runs` imports neither. MiB are the peak of all its processes together, of which torch takes 700."
)


def main() -> int:
    """Run the table for the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=list(FAMILIES), action="append", help="all by default")
    parser.add_argument("--only", default="", help="only damage whose name contains this text, and undamaged files")
    parser.add_argument("--commands", default="", help="commands whose names match this expression")
    parser.add_argument("--record", type=Path, help="file of JSON lines to add cells to")
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="d9d-strangers-") as folder:
        families = options.family or FAMILIES
        cells = table(Path(folder), families, options.only, options.commands, options.record, options.jobs)
    print(markdown(cells))
    return int(not all(cell.is_sound for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
