"""Rounds of a comparison: each contender in a process of its own, one after another, in changing order.

Contenders run one at a time, so that each has the whole memory of the device. Each starts anew in each round, so that
the spread over rounds includes the differences between starts. After the first round, compiled code comes from torch's
cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from settings import Setting

HERE = Path(__file__).parent
Answer = dict[str, Any]


def ask(name: str, setting: Setting, profiled: bool, seconds: float | None = None) -> Answer:
    """Answer of one contender in one round, see :func:`worker.run_round`.

    Args:
        name: name of the contender.
        setting: setting of the comparison.
        profiled: whether to measure the time by kind of work, too.
        seconds: longest time for the answer; ``None`` for no limit.
    """
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory, "answer.json")
        values = json.dumps(setting.as_json())
        command = [sys.executable, str(HERE), "--worker", name, values, "profiled" if profiled else "", str(answer)]
        started = time.perf_counter()
        try:
            # Its output goes to standard error, because standard output is for the result of this program.
            done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {seconds:.0f} s"}
        taken = time.perf_counter() - started
        if not answer.exists():
            return {"failed": f"its process ended with status {done.returncode}", "process_seconds": taken}
        found: Answer = json.loads(answer.read_text(encoding="utf-8"))
        return {**found, "process_seconds": taken}


def run(
    setting: Setting,
    names: Sequence[str],
    rounds: int,
    budget: float | None,
    say: Callable[[str], None],
    asked: Callable[..., Answer] = ask,
) -> dict[str, list[Answer]]:
    """Answers of all contenders, round by round. A contender that is skipped or fails is not run again.

    Args:
        setting: setting of the comparison.
        names: names of the contenders.
        rounds: number of rounds.
        budget: seconds; a round that would not fit is left out, and a contender in the first round gets the remaining
            time.
        say: function that prints a line.
        asked: function that returns the answer of a contender.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    began = time.perf_counter()

    def left() -> float | None:
        return None if budget is None else max(budget - (time.perf_counter() - began), 1.0)

    for number in range(rounds):
        present = [name for name in names if number == 0 or "seconds" in answers[name][-1]]
        rest = left()
        if number and rest is not None and sum(answers[name][-1]["process_seconds"] for name in present) > rest:
            say(f"{number} of {rounds} rounds: another one would take longer than the {rest:.0f} s that are left")
            break
        # Alternate the order: the first contender after a pause runs at other GPU clocks.
        for name in present[:: 1 if number % 2 == 0 else -1]:
            found = asked(name, setting, number == 0, left())
            answers[name].append(found)
            if "seconds" in found:
                speed = setting.tokens / found["seconds"]
                took = f"started in {found['start_seconds']:.0f} s"
                say(f"round {number + 1}: {name}: {speed:,.0f} tokens/s, {took}")
            else:
                say(f"round {number + 1}: {name}: {next(f'{k}: {v}' for k, v in found.items() if k != 'hardware')}")
    return answers
