"""Parts of ``tools/bench/cpu.py``, each run by the Python of the environment that is measured, in a process of its own.

Parts call only interfaces that have been declared for long, so that they also run on earlier commits. A part returns
seconds by name: medians over repetitions in one process, after a repetition that is not counted.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart" / "job.yaml"
Seconds = dict[str, float]


def repeated(action: Callable[[], Any], times: int = 5) -> float:
    """Median seconds of an action, after one warm-up call."""
    action()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def config() -> Seconds:
    """Read and validate a job file: names, values, capabilities."""
    from d9d_engine.job import Job

    def load() -> None:
        Job.load(QUICKSTART).resolve(1)

    return {"job file: read and validate": repeated(load, 9)}


def state_graph() -> Seconds:
    """Build state graphs of 3,000 tensors."""
    import state_graph as bench

    names = ("bind by patterns", "bind by layers", "apply", "invert and bind")
    return {f"state graph: {name}": value for name, value in zip(names, bench.measure(3000), strict=True)}


def load() -> Seconds:
    """Load a model directory of 64 MiB through mappers into plain tensors."""
    import torch
    from d9d_weights.graph.graph import StateGraph
    from d9d_weights.hugging_face.directory import ModelDirectory
    from d9d_weights.hugging_face.load import load_tensors
    from load_memory import mapper
    from read_model import write_model

    with tempfile.TemporaryDirectory() as place:
        model = Path(place, "model")
        write_model(model, 64 * 2**20, 2**25)
        with ModelDirectory.open(model) as directory:
            layers = len({name.split(".")[1] for name in directory.specs})
            graph = StateGraph(mapper(layers), directory.specs)
            targets = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in graph.specs.items()}
            seconds = repeated(lambda: load_tensors(graph, directory, targets, threads=1), 3)
        size = sum(target.nbytes for target in targets.values()) / 2**20
        return {f"model of {size:,.0f} MiB through mappers": seconds}


def simulator() -> Seconds:
    """Generate and simulate the programs of a schedule."""
    from d9d_pipeline.schedule.zero_bubble_v import zero_bubble_v
    from d9d_pipeline.simulator.costs import Costs
    from d9d_pipeline.simulator.run import simulate

    programs = zero_bubble_v(8, 32)
    return {
        "zero_bubble_v, 8 ranks, 32 microbatches: generate": repeated(lambda: zero_bubble_v(8, 32)),
        "the same: simulate": repeated(lambda: simulate(programs, Costs(transfer=0.05))),
    }


def checkpoint() -> Seconds:
    """Save and load a checkpoint of 64 MiB in 96 tensors."""
    import torch
    from d9d_engine.checkpoint.store import CheckpointStore

    tensors = {f"model/{index}/{part}": torch.rand(512, 341) for index in range(32) for part in "abc"}
    size = f"checkpoint of {sum(tensor.nbytes for tensor in tensors.values()) / 2**20:.0f} MiB"
    with tempfile.TemporaryDirectory() as place:
        store = CheckpointStore(Path(place, "checkpoints"), 1)
        steps = iter(range(1, 1000))
        saved = repeated(lambda: store.save(next(steps), tensors, {}, {}), 3)

        def read() -> None:
            found = store.newest(lambda _: None)
            assert found is not None
            found.load_into(tensors)

        return {f"{size}: save": saved, f"{size}: load": repeated(read, 3)}


def step() -> Seconds:
    """Steps of the quickstart's job, with logging and the other work of a run between them."""
    from d9d_engine.job import Job

    with tempfile.TemporaryDirectory() as place:
        given = [f"run.dir={place}", "trackers=[]", "evaluation=null", "checkpoint.every=null", "export=false"]
        trainer = Job.load(QUICKSTART, overrides=given).build(lambda _: None)
        trainer.start()
        steps = trainer.steps()
        seconds = repeated(lambda: next(steps), 9)
        trainer.prefetcher.close()
        return {"quickstart: a training step": seconds}


PARTS: dict[str, Callable[[], Seconds]] = {
    "config": config,
    "state-graph": state_graph,
    "load": load,
    "simulator": simulator,
    "checkpoint": checkpoint,
    "step": step,
}


if __name__ == "__main__":
    part, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(PARTS[part]()), encoding="utf-8")
