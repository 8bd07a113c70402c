"""Time of a training step with all trackers on, and with a tracker that takes a second per write, against none.

    python tools/bench/trackers.py
    python tools/bench/trackers.py --rounds 9 --steps 60 --hidden 512

Rounds alternate between the kinds of runs in one process. Each run has a trainer of its own, and is measured after its
first steps, when its trackers are open and its first checkpoint is saved; this first save waits for a late tracker, for
ten seconds at most. Further checkpoints are part of the measurement. The tool prints a line per round, then the median
of the ratios within rounds. If other processes use the machine, single rounds differ by more than the measured effect;
so a run without trackers is also compared with itself.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from d9d_core.config import PluginConfig
from d9d_core.events import StepEnds, TrainingStarts
from d9d_core.plugin import Ref, TrackerSpec, hookimpl
from d9d_core.registry.registry import Registry
from d9d_core.tracker import RunInfo
from d9d_core.types import State
from d9d_engine.job import Job
from random_tokens import Synthetic

MODULES = ("d9d_nn.plugin", "d9d_optim.plugin", "d9d_qwen3.plugin")
#: Tracker -> its section of the job file; trackers whose library is not installed are left out.
ALL: Mapping[str, Mapping[str, Any]] = {
    "console": {},
    "jsonl": {"picture": False},
    "tensorboard": {},
    "wandb": {"project": "bench", "mode": "offline"},
    "mlflow": {},
    "aim": {},
}


class SleepyConfig(PluginConfig):
    """Config of a tracker that takes a second per write."""

    name: Literal["sleepy"] = "sleepy"
    """Selects the tracker."""


class Sleepy:
    """Tracker that takes a second for each write."""

    def __init__(self, _: SleepyConfig) -> None:
        pass

    def open(self, *_: RunInfo | State | None) -> Sleepy:
        """Open the run."""
        return self

    def write(self, _step: int, _values: Mapping[str, float]) -> None:
        """Sleep for a second."""
        time.sleep(1.0)

    def flush(self) -> None:
        """Do nothing."""

    def state(self) -> State:
        """Empty state."""
        return {}

    def close(self, _status: str) -> None:
        """Do nothing."""


class SleepyPlugin:
    """A plugin with one tracker."""

    D9D_API = 2

    @hookimpl
    def d9d_trackers(self) -> Iterator[TrackerSpec]:
        """The tracker ``sleepy``."""
        yield TrackerSpec(
            name="sleepy",
            summary="Takes a second per write.",
            config=Ref(f"{__name__}:SleepyConfig"),
            build=Ref(f"{__name__}:Sleepy"),
        )


class Clock:
    """Subscriber that times steps after the trackers are open.

    Args:
        warm: steps that do not count.
    """

    def __init__(self, warm: int) -> None:
        self._warm = warm
        self._trainer: Any = None
        self.times: list[float] = []

    def subscriptions(self) -> list[Any]:
        """Events at the start of training and at the ends of steps."""
        return [(TrainingStarts, self._start), (StepEnds, self._step)]

    def of(self, trainer: Any) -> Clock:
        """Set the trainer whose trackers to wait for."""
        self._trainer = trainer
        return self

    def _start(self, _: TrainingStarts) -> None:
        self._trainer.trackers.flush()

    def _step(self, event: StepEnds) -> None:
        event.result.loss.item()  # the device has finished the step
        if event.step >= self._warm:
            self.times.append(time.perf_counter())


def run(kind: str, options: argparse.Namespace) -> float:
    """Mean seconds per step of one run."""
    present = [n for n in ALL if n in ("console", "jsonl") or importlib.util.find_spec(n)]
    sections: dict[str, list[Any]] = {"sleepy": ["sleepy"], "all": [{"name": name, **ALL[name]} for name in present]}
    trackers = sections.get(kind, [])
    registry = Registry.of(
        *map(importlib.import_module, MODULES),
        *(importlib.import_module(f"d9d_{name}.plugin") for name in present if name not in ("console", "jsonl")),
        Synthetic(),
        SleepyPlugin(),
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        values = {
            "run": {"dir": directory}, "steps": options.warm + options.steps, "batch": {"size": options.samples},
            "model": {
                "name": "qwen3", "vocab_size": 4096, "hidden_size": options.hidden,
                "intermediate_size": 3 * options.hidden, "num_layers": options.layers, "num_attention_heads": 8,
                "num_key_value_heads": 4, "max_positions": options.sequence,
            },
            "task": "causal_lm", "optimizer": "adamw", "trackers": trackers, "export": False,
            "data": {"name": "random_tokens", "vocab_size": 4096, "sequence_length": options.sequence},
            "logging": {"every": options.every}, "checkpoint": {"every": options.save, "keep": 1},
        }  # fmt: skip
        clock = Clock(options.warm)
        trainer = Job.from_values(values, registry=registry).build(lambda _: None, observers=[clock])
        clock.of(trainer)
        trainer.train()
    return (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1)


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "rounds": 5, "steps": 60, "warm": 25, "save": 20, "every": 10,
        "hidden": 512, "layers": 4, "samples": 4, "sequence": 128,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {"all": [], "sleepy": [], "again": []}
    run("all", options)  # warm-up, which imports the libraries
    for number in range(options.rounds):
        kinds = ["none", *ratios]
        order = kinds if number % 2 == 0 else kinds[::-1]
        seconds = {kind: run(kind, options) for kind in order}
        for kind, found in ratios.items():
            found.append(seconds[kind] / seconds["none"])
        print(f"round {number}: none {1000 * seconds['none']:.1f} ms;", end=" ")
        print(", ".join(f"{kind} {found[-1]:.3f}x" for kind, found in ratios.items()), flush=True)
    for kind, found in ratios.items():
        label = {"all": "all trackers", "sleepy": "a second per write", "again": "none again"}[kind]
        print(f"{label}: {statistics.median(found):.3f}x (from {min(found):.3f} to {max(found):.3f})")


if __name__ == "__main__":
    main()
