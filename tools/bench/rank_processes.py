"""Processes of a benchmark with one rank per GPU: launches and watches them, and ends them if they make no progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import records

#: Seconds without an answer after which processes are ended.
PATIENCE = 180


def answers_of(
    script: str,
    questions: Sequence[Mapping[str, Any]],
    ranks: int,
    seconds: float | None,
    directory: Path,
    more: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Answers to at least the first question, from new processes; the last answer may say that the processes ended.

    Args:
        script: file in this directory, whose arguments are files of questions and answers, the time of its launch and
            ``more``; see :func:`rank_steps.answer_all`.
        questions: each with a ``name``.
        ranks: number of processes.
        seconds: time limit, after which the processes are ended, and the remaining questions get no answer.
        directory: directory for the two files.
        more: further arguments.
    """
    asked, answered = directory / "questions.json", directory / "answers.jsonl"
    asked.write_text(json.dumps(questions), encoding="utf-8")
    answered.write_text("", encoding="utf-8")
    worker = [str(Path(__file__).parent / script), str(asked), str(answered), str(time.time()), *more]
    if ranks == 1:
        command = [sys.executable, *worker]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *worker]
    threads = str(max(1, (os.cpu_count() or 1) // ranks // 2))
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": threads, **os.environ})
    begun = changed = time.perf_counter()
    size, why = 0, None
    while process.poll() is None:
        time.sleep(0.2)
        now = time.perf_counter()
        if answered.stat().st_size != size:
            size, changed = answered.stat().st_size, now
        if seconds is not None and now - begun > seconds:
            why = "no time"
        elif now - changed > PATIENCE:
            why = f"no answer within {PATIENCE} s"
        if why:
            process.terminate()
            process.wait()
    answers = [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]
    failed = bool(answers) and "failed" in answers[-1]
    if len(answers) < len(questions) and why != "no time" and not failed:
        reason = why or f"the processes ended with status {process.returncode}"
        answers.append({"name": questions[len(answers)]["name"], "failed": reason, "hardware": records.hardware()})
    return answers
