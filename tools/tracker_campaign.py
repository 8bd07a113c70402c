"""Kills a run with all trackers, resumes it, and checks the values in each tracker.

    uv run python tools/tracker_campaign.py [--kills 20] [--seed 0] [--trackers jsonl,tensorboard,wandb,mlflow,aim]

A small run logs in each step, and is killed with SIGKILL (one process, or all) after a random step, mostly between two
checkpoints; the last process may finish. Its series have plain and unusual names (`WORDS`), and its clock jumps by a
day or a year. In each tracker, each series must have each step exactly once, in order, with the value in
`metrics.jsonl`; so must histograms and texts where a tracker supports them. A tracker may refuse a name with one note
per process, but must have all other names. Exit status 1 on a violation. Trackers without their library are skipped and
listed. A process that is killed before its first checkpoint leaves no state to resume: the next process starts a new
run, which is checked instead.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from d9d_core.tracker import SeriesName, storable

#: Mean number of steps between two kills; number of steps between two checkpoints.
STRIDE, EVERY = 30, 12
#: Tracker -> its section of the job file.
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "jsonl": {"picture": False},
    "tensorboard": {},
    "wandb": {"project": "campaign", "mode": "offline"},
    "mlflow": {},
    "aim": {"log_system_params": False, "capture_terminal_logs": False, "system_tracking_interval": None},
}
#: Tracker -> library that it needs.
LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "aim": "aim"}
#: Series of timings, which differ between processes.
TIMES = frozenset({"tokens_per_second"})
#: Unusual names of series: paths, control characters, half a surrogate pair, 10,000 characters, and names that collide
#: if a backend ignores case or replaces characters.
WORDS = (
    *("", ".", "..", "a/b", "a/../b", "/a", "$", "-", " ", "nul\0", "\x1b[31mred", "two\nlines", "half \ud800"),
    *("x" * 10_000, "x" * 10_001, "Word", "word", "WORD", "a b", "a_b", "a-b", "a:b", "a.b", "a%2Fb", "_a", "step"),
    "said/7.txt",  # a text whose artifact path in MLflow collides with another text's file
)
#: Series of unusual words, each as a name and as a tag; a point in every PERIOD-th step, because trackers write files.
ODD = (*WORDS, *(SeriesName("tagged", {"word": word}) for word in WORDS))
PERIOD = 7
#: Values of series N begin at (N + 1) * FACTOR, so that a value identifies its series under any name.
FACTOR = 10_000
#: Errors of the clock in seconds, drawn at random.
OFFSETS = (0, -86_400, 365 * 86_400)
#: Step, series and value.
Point = tuple[int, str, float]


class Entry(NamedTuple):
    """Value stored by a tracker.

    Attributes:
        kind: ``number``, ``histogram`` or ``text``.
        step: step of the value.
        name: name of the series in the tracker.
        value: the number; for a histogram its second count, for a text the number in it.
    """

    kind: str
    step: int
    name: str
    value: float


def main() -> int:
    """Run the campaign, and print the violations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trackers", default=",".join(SECTIONS))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        train(arguments.child, Clock(arguments.seed))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        problems = campaign(Path(folder), arguments.kills, arguments.seed, arguments.trackers.split(","))
    print("\n".join(problems) or "every series is complete, and no step appears twice")
    return int(bool(problems))


def campaign(
    directory: Path, kills: int, seed: int, trackers: Iterable[str], say: Callable[[str], None] = print
) -> list[str]:
    """Kill and resume a run; return the violations in its trackers."""
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
        step = killed(directory, after, draw, with_children)
        say(f"kill {number}: after step {step}{', with all its processes' if with_children else ''}")
    with (directory / "child.log").open("ab") as file:
        subprocess.run(command(directory, draw), check=True, stdout=file, stderr=file, env=environment())
    say(f"starts without a checkpoint: {fresh}")
    log = (directory / "child.log").read_text(errors="replace")
    problems: list[str] = re.findall(r"tracker '.*' failed and is switched off: .*", log)
    expected, _ = points_of("jsonl", read_jsonl(directory))
    for name in chosen:
        entries = list(READERS[name](directory))
        found, mixed = points_of(name, entries)
        problems += mixed
        say(f"{name}: {len(found)} points in {len({series for _, series, _ in found})} series")
        kinds = {kind for kind in ("histogram", "text", "number") if name != "mlflow" or kind != "histogram"}
        wanted = [point for point in expected if point[1].split()[0] in kinds]
        refused, noisy = refusals(name, log, kills + 1)
        problems += noisy
        if refused:
            say(f"{name} refuses {sorted(refused)}")
        problems += compare(name, total, wanted, found, refused)
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


class Clock:
    """Wrong wall clock of this process, which jumps at random; the monotonic clock stays right.

    Args:
        seed: seed of the jumps.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311 - no secrets
        self._right = time.time
        self._offset = self._draw.choice(OFFSETS)
        time.time = self._now

    def maybe_jump(self) -> None:
        """Jump with probability 1/8."""
        if self._draw.random() < 1 / 8:
            self._offset = self._draw.choice(OFFSETS)

    def _now(self) -> float:
        return self._right() + self._offset


def train(directory: Path, clock: Clock) -> None:
    """Train in this process, with a subscriber that logs."""
    import torch
    from d9d_core.events import StepEnds, TrainingStarts
    from d9d_core.registry.registry import Registry
    from d9d_core.tracker import Histogram
    from d9d_engine.job import Job

    class Logs:
        """Subscriber that logs a tagged scalar, a histogram and a text in each step, and series with unusual names."""

        log: Any = None

        def subscriptions(self) -> list[Any]:
            return [(TrainingStarts, self.start), (StepEnds, self.step)]

        def start(self, event: TrainingStarts) -> None:
            self.log = event.log

        def step(self, event: StepEnds) -> None:
            self.log.scalar("mine", torch.tensor(float(event.step + 1)), {"stage": "train"})
            self.log.histogram("sizes", Histogram(torch.tensor([1.0, event.step + 1.0]), 0.0, 2.0))
            self.log.text("said", f"step {event.step + 1}")
            for number in range((event.step + 1) % PERIOD, len(ODD), PERIOD):
                self.odd(number, (number + 1) * FACTOR + event.step + 1)
            clock.maybe_jump()
            time.sleep(0.02)

        def odd(self, number: int, value: int) -> None:
            series = ODD[number]
            name, tags = (series.base, series.tags) if isinstance(series, SeriesName) else (series, None)
            self.log.scalar(name, torch.tensor(float(-value)), tags)
            self.log.histogram(name, Histogram(torch.tensor([1.0, float(value)]), 0.0, 2.0), tags)
            self.log.text(name, f"step {value}\n{WORDS[number % len(WORDS)]}", tags)

    modules = [
        "d9d_testing.toy.plugin",
        *(f"d9d_{name}.plugin" for name, lib in LIBRARIES.items() if importlib.util.find_spec(lib)),
    ]
    registry = Registry.of(*map(importlib.import_module, modules))
    Job.load(directory / "job.json", registry=registry).build(print, observers=[Logs()]).train()


def command(directory: Path, draw: random.Random) -> list[str]:
    """Command that trains until the run has finished; unbuffered, so that its output survives a kill."""
    return [sys.executable, "-u", __file__, "--child", str(directory), "--seed", str(draw.randrange(1 << 30))]


def environment() -> dict[str, str]:
    """Environment without the user's settings for the tracker libraries."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_", "AIM_"))}


def last_step(directory: Path) -> int:
    """Last logged step."""
    path = directory / "campaign" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return next((json.loads(line)["step"] for line in reversed(lines) if line.endswith("}")), 0)


def killed(directory: Path, after: int, draw: random.Random, with_children: bool) -> int:
    """Train, kill the process soon after it has logged a step, and return the last logged step.

    Raises:
        RuntimeError: the run ended before the kill.
    """
    log = (directory / "child.log").open("ab")
    with (
        log,
        subprocess.Popen(
            command(directory, draw), stdout=log, stderr=log, env=environment(), start_new_session=True
        ) as child,
    ):
        while last_step(directory) < after:
            if child.poll() is not None:
                raise RuntimeError(f"the run ended by itself: {(directory / 'child.log').read_text()[-3000:]}")
            time.sleep(0.01)
        time.sleep(draw.random() * 0.03)
        if with_children:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
        child.wait()
    return last_step(directory)


def points_of(tracker: str, entries: Iterable[Entry]) -> tuple[list[Point], list[str]]:
    """Points by series, unusual series by their index; and an error line for each name that two series share."""
    points, series_of, names_of = list[Point](), dict[str, set[str]](), dict[str, set[str]]()
    for kind, step, name, value in entries:
        number, rest = divmod(abs(value), FACTOR) if name not in TIMES and math.isfinite(value) else (0, value)
        series = f"{kind} of word {int(number) - 1}" if number else f"{kind} {name}"
        points.append((step, series, rest if number else value))
        series_of.setdefault(f"{kind} {name}", set()).add(series)
        names_of.setdefault(series, set()).add(name)
    mixed = [f"{tracker}: {name!a} holds {sorted(found)}" for name, found in series_of.items() if len(found) > 1]
    return points, mixed + [
        f"{tracker}: {one} is {sorted(found)!a}" for one, found in names_of.items() if len(found) > 1
    ]


def refusals(tracker: str, log: str, processes: int) -> tuple[set[str], list[str]]:
    """Series that a tracker refused according to the log; and an error line for each name with too many notes."""
    found = Counter(re.findall(rf"tracker '{tracker}' refuses the (\w+) ('.*?'), which", log))
    named = {_readable(storable(series)): number for number, series in enumerate(ODD)}
    refused = {f"{kind} of word {named[name]}" if name in named else f"{kind} {name}" for kind, name in found}
    return refused, [f"{tracker}: {name}: {count} notes" for name, count in found.items() if count > processes]


def _readable(name: str) -> str:
    return ascii(name if len(name) <= 80 else f"{name[:80]}...")


def compare(
    tracker: str, total: int, expected: Iterable[Point], found: Iterable[Point], refused: Collection[str] = ()
) -> list[str]:
    """Compare a tracker's points with the expected ones; one line for each wrong series."""
    values: dict[str, dict[int, float]] = {}
    for step, name, value in expected:
        values.setdefault(name, {})[step] = value
    series: dict[str, list[tuple[int, float]]] = {}
    for step, name, value in found:
        series.setdefault(name, []).append((step, value))
    problems = []
    for name in sorted((values.keys() - set(refused)) | series.keys()):
        points = series.get(name, [])
        steps = [step for step, _ in points]
        twice = sorted({step for step in steps if steps.count(step) > 1})
        lacking = sorted(set(steps_of(name, total)) - set(steps))
        wrong = [
            step for step, value in points
            if name.split()[-1] not in TIMES
            and not math.isclose(value, values.get(name, {}).get(step, value), rel_tol=1e-6)
        ]  # fmt: skip
        order = ", not in the order of steps" if steps != sorted(steps) else ""
        if twice or lacking or wrong or order:
            problems.append(f"{tracker}: {name}: twice {twice}, lacking {lacking}, wrong {wrong}{order}")
    return problems


def steps_of(name: str, total: int) -> range:
    """Steps that a series must have: all, or every PERIOD-th for an unusual name."""
    if " of word " not in name:
        return range(1, total + 1)
    return range(int(name.rsplit(maxsplit=1)[-1]) % PERIOD or PERIOD, total + 1, PERIOD)


# --- readers of the finished run


def read_jsonl(directory: Path) -> Iterator[Entry]:
    """Entries of the tracker ``jsonl``."""

    def lines(kind: str) -> Iterator[dict[str, Any]]:
        yield from map(json.loads, (directory / "campaign" / f"{kind}.jsonl").read_text().splitlines())

    for line in lines("metrics"):
        yield from (Entry("number", line["step"], name, line[name]) for name in line if name != "step")
    yield from (Entry("histogram", line["step"], line["histogram"], line["counts"][1]) for line in lines("histograms"))
    yield from (Entry("text", line["step"], line["name"], _told(line["text"])) for line in lines("texts"))


def read_tensorboard(directory: Path) -> Iterator[Entry]:
    """Entries of the tracker ``tensorboard``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    guidance = dict.fromkeys(("scalars", "tensors", "histograms"), 0)
    reader = EventAccumulator(str(directory / "campaign" / "tensorboard"), size_guidance=guidance)
    reader.Reload()
    for name in reader.Tags()["scalars"]:
        yield from (Entry("number", event.step, name, event.value) for event in reader.Scalars(name))
    for name in reader.Tags()["histograms"]:
        for event in reader.Histograms(name):
            yield Entry("histogram", event.step, name, event.histogram_value.bucket[1])
    for name in reader.Tags()["tensors"]:
        for event in reader.Tensors(name):
            if event.step:  # step 0 has the summary of the run
                text = make_ndarray(event.tensor_proto).item().decode()
                yield Entry("text", event.step, name.removesuffix("/text_summary"), _told(text))


def read_wandb(directory: Path) -> Iterator[Entry]:
    """Entries of the tracker ``wandb``, over the files of all processes."""
    from d9d_wandb.segments import Segment

    rows: dict[str, list[dict[str, Any]]] = {}
    for path in (directory / "campaign" / "wandb").glob("offline-run-*/run-*.wandb"):
        rows.setdefault(path.name, []).extend(Segment(path).rows())
    if not rows:
        raise SystemExit(f"{directory}: wandb has written no run")
    for row in sorted(max(rows.values(), key=_last_of), key=lambda row: row["_step"]):
        for name, value in row.items():
            if name == "step" or name.startswith("_"):
                continue
            if isinstance(value, dict):
                yield Entry("histogram", row["step"], name, value["values"][1])
            else:
                yield Entry("text" if isinstance(value, str) else "number", row["step"], name, _told(value))


def _last_of(rows: Iterable[Mapping[str, Any]]) -> int:
    return max((row["step"] for row in rows), default=0)


def read_mlflow(directory: Path) -> Iterator[Entry]:
    """Entries of the tracker ``mlflow``; texts are artifacts with the step in their name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'campaign' / 'mlflow.db'}")
    (experiment,) = (one for one in client.search_experiments() if one.name == "d9d")
    (run,) = (run for run in client.search_runs([experiment.experiment_id]) if run.info.status == "FINISHED")
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            yield Entry("number", point.step, name, point.value)
    texts = directory / "campaign" / "mlflow-artifacts" / run.info.run_id / "artifacts" / "texts"
    for path in sorted((path for path in texts.rglob("*.txt") if path.is_file()), key=lambda path: int(path.stem)):
        yield Entry("text", int(path.stem), str(path.parent.relative_to(texts)), _told(path.read_text()))


def read_aim(directory: Path) -> Iterator[Entry]:
    """Entries of the tracker ``aim``."""
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    repo = aim.Repo.from_path(str(directory / "campaign" / "aim"))
    for each in repo.list_all_runs():
        RepoIndexManager.get_index_manager(repo).index(each)
    runs = (aim.Run(each, repo=repo, read_only=True) for each in repo.list_all_runs())
    (run,) = (run for run in runs if run.get("status") == "finished")
    kinds: Mapping[str, tuple[tuple[str, ...], Callable[[Any], Any], Callable[[Any], float]]] = {
        "number": (("float", "int"), lambda one: run.get_metric(*one), float),
        "histogram": (
            ("aim.distribution",),
            lambda one: run.get_distribution_sequence(*one),
            lambda value: float(value.weights[1]),
        ),
        "text": (("aim.text",), lambda one: run.get_text_sequence(*one), lambda value: _told(value.data)),
    }
    for kind, (types, sequence_of, read) in kinds.items():
        for name, context, _ in run.iter_sequence_info_by_type(types):
            steps, (values, *_) = sequence_of((name, context)).data.items_list()
            shown = "/".join([*context.to_dict().values(), name])
            yield from (Entry(kind, step, shown, read(value)) for step, value in zip(steps, values, strict=True))


def _told(text: Any) -> float:
    return float(text.split("\n")[0].removeprefix("step ")) if isinstance(text, str) else float(text)


READERS: Mapping[str, Callable[[Path], Iterator[Entry]]] = {
    "jsonl": read_jsonl,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "aim": read_aim,
}

if __name__ == "__main__":
    sys.exit(main())
