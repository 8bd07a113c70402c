"""Kills a run with all trackers on, resumes it, and reads back what each of them has.

    uv run python tools/tracker_campaign.py [--kills 20] [--seed 0] [--trackers jsonl,tensorboard,wandb,mlflow,aim]

A small run logs in each step, and is killed with SIGKILL (itself, or with all its processes) after a random step,
mostly between two checkpoints; the last process may finish. Each series must then have each step exactly once in each
tracker, with the value that `metrics.jsonl` has, and so must histograms and texts where a tracker takes any. Exit
status 1: one has not. Trackers whose library is not installed are left out, and named. A process that is killed before
its first checkpoint leaves nothing to resume: the next one begins a new run, which is the one that is looked at.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

#: Steps between two kills, on average, and between two checkpoints.
STRIDE, EVERY = 30, 12
#: Tracker -> its section of the job file.
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "jsonl": {"picture": False},
    "tensorboard": {},
    "wandb": {"project": "campaign", "mode": "offline"},
    "mlflow": {},
    "aim": {"log_system_params": False, "capture_terminal_logs": False, "system_tracking_interval": None},
}
#: Tracker -> the library that it needs.
LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "aim": "aim"}
#: Series whose values are times: alike in no two processes.
TIMES = frozenset({"tokens_per_second"})
#: Step, series, value.
Point = tuple[int, str, float]


def main() -> int:
    """Run the campaign, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trackers", default=",".join(SECTIONS))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        train(arguments.child)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        problems = campaign(Path(folder), arguments.kills, arguments.seed, arguments.trackers.split(","))
    print("\n".join(problems) or "every series is complete, and no step is there twice")
    return int(bool(problems))


def campaign(
    directory: Path, kills: int, seed: int, trackers: Iterable[str], say: Callable[[str], None] = print
) -> list[str]:
    """Kill and resume a run, and return what is wrong with what its trackers have."""
    chosen = [name for name in trackers if name not in LIBRARIES or importlib.util.find_spec(LIBRARIES[name])]
    if missing := ", ".join(set(trackers) - set(chosen)):
        say(f"not installed, and left out: {missing}")
    total = STRIDE * (kills + 1)
    write_job(directory, total, chosen)
    draw = random.Random(seed)  # noqa: S311 - no secrets
    fresh = 0
    for number in range(1, kills + 1):
        fresh += not any((directory / "campaign" / "checkpoints").glob("step-*"))
        after = max(STRIDE * number - draw.randrange(STRIDE), last_step(directory) + 1)
        with_children = draw.random() < 0.5
        step = killed(directory, after, draw.random() * 0.03, with_children)
        say(f"kill {number}: after step {step}{', with all its processes' if with_children else ''}")
    subprocess.run(command(directory), check=True, stdout=subprocess.DEVNULL, env=environment())
    say(f"starts without a checkpoint: {fresh}")
    expected = read_jsonl(directory)
    problems = compare("jsonl", total, expected, expected)
    for name in chosen[1:] if chosen[0] == "jsonl" else chosen:
        found = list(READERS[name](directory))
        say(f"{name}: {len(found)} points in {len({series for _, series, _ in found})} series")
        problems += compare(name, total, expected, found)
    return problems


def write_job(directory: Path, total: int, trackers: Iterable[str]) -> None:
    """Write the job file."""
    job = {
        "run": {"name": "campaign", "dir": str(directory)},
        "steps": total,
        "device": "cpu",
        "batch": {"size": 8, "microbatch": 4},
        "model": "toy_model",
        "data": "toy_data",
        "task": {"name": "toy_task", "decay": 0.01},
        "optimizer": "toy_optimizer",
        "trackers": [{"name": name, **SECTIONS[name]} for name in trackers],
        "logging": {"every": 1},
        "checkpoint": {"every": EVERY},
    }
    (directory / "job.json").write_text(json.dumps(job))


def train(directory: Path) -> None:
    """Train in this process, with a subscriber that logs and takes its time."""
    import torch
    from d9d_core.extend import Histogram, StepEnds, TrainingStarts
    from d9d_core.plugin import Registry
    from d9d_engine.api import Job

    class Logs:
        """Subscriber that logs a scalar with a tag, a histogram and a text in each step."""

        log: Any = None

        def subscriptions(self) -> list[Any]:
            return [(TrainingStarts, self.start), (StepEnds, self.step)]

        def start(self, event: TrainingStarts) -> None:
            self.log = event.log

        def step(self, event: StepEnds) -> None:
            self.log.scalar("mine", torch.tensor(float(event.step + 1)), {"stage": "train"})
            self.log.histogram("sizes", Histogram(torch.tensor([1.0, event.step + 1.0]), 0.0, 2.0))
            self.log.text("said", f"step {event.step + 1}")
            time.sleep(0.02)

    modules = [
        "d9d_testing.toy.plugin",
        *(f"d9d_{name}.plugin" for name, lib in LIBRARIES.items() if importlib.util.find_spec(lib)),
    ]
    registry = Registry.of(*map(importlib.import_module, modules))
    Job.load(directory / "job.json", registry=registry).build(print, observers=[Logs()]).train()


def command(directory: Path) -> list[str]:
    """Command that trains until the run is done."""
    return [sys.executable, __file__, "--child", str(directory)]


def environment() -> dict[str, str]:
    """Environment without what a user has set for the libraries."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_", "AIM_"))}


def last_step(directory: Path) -> int:
    """Last step that is logged."""
    path = directory / "campaign" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return next((json.loads(line)["step"] for line in reversed(lines) if line.endswith("}")), 0)


def killed(directory: Path, after: int, delay: float, with_children: bool) -> int:
    """Train, kill the process soon after it has logged a step, and return the step that it had reached.

    Raises:
        RuntimeError: it ended by itself.
    """
    log = (directory / "child.log").open("ab")
    with (
        log,
        subprocess.Popen(
            command(directory), stdout=log, stderr=log, env=environment(), start_new_session=True
        ) as child,
    ):
        while last_step(directory) < after:
            if child.poll() is not None:
                raise RuntimeError(f"the run ended by itself: {(directory / 'child.log').read_text()[-3000:]}")
            time.sleep(0.01)
        time.sleep(delay)
        if with_children:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
        child.wait()
    return last_step(directory)


def compare(tracker: str, total: int, expected: Iterable[Point], found: Iterable[Point]) -> list[str]:
    """Compare what a tracker has with what it should have; one line for each series that is wrong."""
    values: dict[str, dict[int, float]] = {}
    for step, name, value in expected:
        values.setdefault(name, {})[step] = value
    series: dict[str, list[tuple[int, float]]] = {}
    for step, name, value in found:
        series.setdefault(name, []).append((step, value))
    problems = []
    for name in values.keys() | series.keys():
        points = series.get(name, [])
        steps = sorted(step for step, _ in points)
        twice = sorted({step for step in steps if steps.count(step) > 1})
        lacking = sorted(set(range(1, total + 1)) - set(steps))
        wrong = [
            step for step, value in points
            if name not in TIMES and not math.isclose(value, values.get(name, {}).get(step, value), rel_tol=1e-6)
        ]  # fmt: skip
        if twice or lacking or wrong:
            problems.append(f"{tracker}: {name}: twice {twice}, lacking {lacking}, wrong {wrong}")
    return problems


# --- readers: histograms and texts are points whose value is the step that they tell


def read_jsonl(directory: Path) -> list[Point]:
    """Points of the tracker ``jsonl``."""

    def lines(kind: str) -> Iterator[dict[str, Any]]:
        yield from map(json.loads, (directory / "campaign" / f"{kind}.jsonl").read_text().splitlines())

    points = [(line["step"], name, line[name]) for line in lines("metrics") for name in line if name != "step"]
    points += [(line["step"], line["histogram"], line["counts"][1]) for line in lines("histograms")]
    return points + [(line["step"], line["name"], _told(line["text"])) for line in lines("texts")]


def read_tensorboard(directory: Path) -> Iterator[Point]:
    """Points of the tracker ``tensorboard``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    guidance = dict.fromkeys(("scalars", "tensors", "histograms"), 0)
    reader = EventAccumulator(str(directory / "campaign" / "tensorboard"), size_guidance=guidance)
    reader.Reload()
    for name in reader.Tags()["scalars"]:
        yield from ((event.step, name, event.value) for event in reader.Scalars(name))
    for name in reader.Tags()["histograms"]:
        yield from ((event.step, name, event.histogram_value.bucket[1]) for event in reader.Histograms(name))
    for event in reader.Tensors("said/text_summary"):
        yield event.step, "said", _told(make_ndarray(event.tensor_proto).item().decode())


def read_wandb(directory: Path) -> Iterator[Point]:
    """Points of the tracker ``wandb``, over the files of all processes."""
    from d9d_wandb.segments import Segment

    segments = sorted((directory / "campaign" / "wandb").glob("offline-run-*/run-*.wandb"))
    if not segments:
        raise SystemExit(f"{directory}: wandb has written no run")
    for path in (path for path in segments if path.name == segments[-1].name):
        for row in Segment(path).rows():
            for name, value in row.items():
                if name == "step" or name.startswith("_"):
                    continue
                number = value["values"][1] if isinstance(value, dict) else _told(value)
                yield row["step"], name, number


def read_mlflow(directory: Path) -> Iterator[Point]:
    """Points of the tracker ``mlflow``; texts are artifacts, of which there is one for each step by its name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'campaign' / 'mlflow.db'}")
    (experiment,) = (one for one in client.search_experiments() if one.name == "d9d")
    run = max(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.start_time)
    for name in run.data.metrics:
        yield from ((point.step, name, point.value) for point in client.get_metric_history(run.info.run_id, name))
    for path in (directory / "campaign" / "mlflow-artifacts" / run.info.run_id).glob("artifacts/texts/said/*.txt"):
        yield int(path.stem), "said", _told(path.read_text())
    yield from (point for point in read_jsonl(directory) if point[1] == "sizes")  # it takes no histograms


def read_aim(directory: Path) -> Iterator[Point]:
    """Points of the tracker ``aim``."""
    import aim
    from aim.sdk.index_manager import RepoIndexManager
    from aim.storage.context import Context

    repo = aim.Repo.from_path(str(directory / "campaign" / "aim"))
    for each in repo.list_all_runs():
        RepoIndexManager.get_index_manager(repo).index(each)
    run_hash = max(repo.list_all_runs(), key=lambda each: aim.Run(each, repo=repo, read_only=True).creation_time)
    run = aim.Run(run_hash, repo=repo, read_only=True)
    for one in run.metrics():
        steps, (values, *_) = one.data.items_list()
        name = "/".join([*one.context.to_dict().values(), one.name])
        yield from ((step, name, value) for step, value in zip(steps, values, strict=True))
    steps, (values, *_) = run.get_distribution_sequence("sizes", Context({})).data.items_list()
    yield from ((step, "sizes", float(value.weights[1])) for step, value in zip(steps, values, strict=True))
    steps, (values, *_) = run.get_text_sequence("said", Context({})).data.items_list()
    yield from ((step, "said", _told(value.data)) for step, value in zip(steps, values, strict=True))


def _told(text: Any) -> float:
    return float(text.removeprefix("step ")) if isinstance(text, str) else float(text)


READERS: Mapping[str, Callable[[Path], Iterator[Point]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "aim": read_aim,
}

if __name__ == "__main__":
    sys.exit(main())
