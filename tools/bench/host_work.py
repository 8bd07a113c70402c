"""Work of the host in a training step, counted: calls of Python functions, of torch's ops and of compiled graphs.

    python tools/bench/host_work.py            the counts of this commit
    python tools/bench/host_work.py --write    also into tests/host_work.json, which a test compares

Seconds vary with the machine, counts do not: a step that makes more calls is slower on every host, and a small model on
a GPU waits for its host.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from d9d_engine.job import Job
from rows import Row, registry

FILE = Path(__file__).resolve().parents[2] / "tests" / "host_work.json"
#: Jobs by name. Samples form two microbatches, so that accumulation is part of the step.
ROWS: Mapping[str, Row] = {
    "dense": Row("tiny", 4, 32, microbatch=2),
    "dense, compiled": Row("tiny", 4, 32, microbatch=2, compiled=True),
    "experts": Row("tiny-moe", 4, 32, microbatch=2),
    "experts, compiled": Row("tiny-moe", 4, 32, microbatch=2, compiled=True),
    "dense, checkpointed, autocast": Row("tiny", 4, 32, microbatch=2, recomputed=True, precision="autocast"),
}
#: Begin of the name of an event that is the forward of a compiled graph.
_GRAPH = "Torch-Compiled Region"
#: Begins of the names of events whose inner events do not count.
_ENCLOSING = ("aten::", _GRAPH, "CompiledFunctionBackward")
#: Steps before the counted one: they compile, and make the optimizer's state.
_WARMUP = 3


def main() -> None:
    """Count, print, and write the result."""
    parser = argparse.ArgumentParser(description="Work of the host in a training step, counted.")
    parser.add_argument("--write", action="store_true", help=f"write the counts into {FILE.name}")
    options = parser.parse_args()
    found = {name: counts(row) for name, row in ROWS.items()}
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if options.write:
        FILE.write_text(text, encoding="utf-8")


def counts(row: Row) -> dict[str, int]:
    """Counts of a row's step: ``python calls`` in d9d's packages, ``ops``, ``graph calls`` and ``graph breaks``."""
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as directory:
        values = row.values(directory, "cpu")
        values["parallel"] = [
            {"name": "compile", "backend": "aot_eager"} if one == "compile" else one for one in values["parallel"]
        ]
        trainer = Job.from_values(values, registry=registry()).build(lambda _: None)
        try:
            broken = _graph_breaks()
            for number in range(_WARMUP):
                trainer.step(number, trainer.prefetcher.next())
            broken = _graph_breaks() - broken
            packs = [trainer.prefetcher.next() for _ in range(2)]
            calls = _python_calls(lambda: trainer.step(_WARMUP, packs[0]))
            events = _events(lambda: trainer.step(_WARMUP + 1, packs[1]))
        finally:
            trainer.prefetcher.close()
    return {
        "python calls": calls,
        "ops": sum(count for name, count in events.items() if name.startswith("aten::")),
        "graph calls": events[_GRAPH],
        "graph breaks": broken,
    }


def _python_calls(step: Callable[[], Any]) -> int:
    """Number of calls of functions in d9d's packages, in this thread."""
    called = 0

    def note(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal called
        if event == "call" and frame.f_globals.get("__name__", "").startswith("d9d_"):
            called += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return called


def _events(step: Callable[[], Any]) -> Counter[str]:
    """Number of events by name outside of other ops and of compiled graphs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    found: Counter[str] = Counter()
    for event in profile.events() or ():
        around = event.cpu_parent
        while around is not None and not around.name.startswith(_ENCLOSING):
            around = around.cpu_parent
        if around is None:
            found[_GRAPH if event.name.startswith(_GRAPH) else event.name] += 1
    return found


def _graph_breaks() -> int:
    # Dynamo counts nowhere that is public.
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


if __name__ == "__main__":
    main()
