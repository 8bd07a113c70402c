"""Metric, tracker and subscriber."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.events import CheckpointSaved, StepEnds, TrainingFinished, TrainingStarts
from d9d_core.metric import Vector
from d9d_core.subscriber import Subscribes, subscribe
from d9d_core.tracker import RunInfo
from d9d_core.types import State
from torch import Tensor

from frozen_api_2.config import CountConfig, ErrorConfig, LinesConfig


class Error(AccumulatedMetric):
    def __init__(self, config: ErrorConfig) -> None:
        super().__init__(total=Accumulator("sum"), count=Accumulator("sum"), largest=Accumulator("max"))

    def update(self, observations: Mapping[str, Tensor]) -> None:
        error = observations["error"]
        self.accumulate(total=error.sum(), count=error.new_tensor(float(error.numel())), largest=error.max())

    def compute(self) -> Mapping[str, Tensor | Vector]:
        return {"frozen_mean": self["total"] / self["count"].clamp(min=1), "frozen_largest": self["largest"]}


class Lines:
    def __init__(self, config: LinesConfig) -> None:
        pass

    def open(self, run: RunInfo, state: State | None) -> "LinesRun":
        return LinesRun(run.directory / "lines.txt", run.resumed_step)


class LinesRun:
    def __init__(self, path: Path, step: int) -> None:
        lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
        path.write_text("".join(line for line in lines if int(line.split()[0]) <= step))
        self.path = path

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {' '.join(f'{name}={value:.6g}' for name, value in values.items())}\n")

    def flush(self) -> None:
        pass

    def state(self) -> State:
        return {}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        self.path.with_name("status.txt").write_text(status)


class Count(Subscribes):
    def __init__(self, config: CountConfig) -> None:
        self.limit, self.seen, self.saved = config.limit, 0, 0

    @property
    def reason_to_end(self) -> str | None:
        return f"{self.seen} steps are enough" if self.seen >= self.limit else None

    @subscribe(TrainingStarts)
    def start(self, event: TrainingStarts) -> None:
        print(f"frozen_count starts before step {event.step}")

    @subscribe(StepEnds)
    def step(self, event: StepEnds) -> None:
        self.seen += 1

    @subscribe(CheckpointSaved)
    def save(self, event: CheckpointSaved) -> None:
        self.saved += 1

    @subscribe(TrainingFinished)
    def end(self, event: TrainingFinished) -> None:
        print(f"frozen_count saw {self.seen} steps")

    def state(self) -> State:
        return {"seen": self.seen}

    def load_state(self, state: State) -> None:
        assert isinstance(state["seen"], int)
        self.seen = state["seen"]
