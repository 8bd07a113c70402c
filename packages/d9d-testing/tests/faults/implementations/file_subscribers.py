"""A single-file plugin: a subscriber that writes a file, with a fault of choice. For the tests of the suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from d9d_core import events as ev
from d9d_core.config import PluginConfig
from d9d_core.plugin import Ref, SubscriberSpec, hookimpl
from d9d_core.types import State
from torch import distributed as dist

Fault = Literal[
    "none",
    "every rank writes",
    "writes steps again",
    "starts a new file",
    "writes the numbers of its rank",
    "forgets its count",
]


class StepsFileConfig(PluginConfig):
    """A line of JSON for each step, and a summary at the end."""

    name: Literal["steps_file"] = "steps_file"
    """Selects the subscriber."""
    path: str
    """File to write."""
    fault: Fault = "none"
    """Fault of the subscriber."""


class StepsFile:
    """Lines of the steps so far are cut off behind the step at which a run resumes."""

    def __init__(self, config: StepsFileConfig) -> None:
        self.path, self.fault, self.steps, self.samples = Path(config.path), config.fault, 0, 0

    def subscriptions(self) -> Iterator[tuple[type[Any], Callable[..., None]]]:
        yield ev.TrainingStarts, self.start
        yield ev.StepStarts, self.count
        yield ev.ValuesLogged, self.log
        yield ev.TrainingFinished, self.finish

    @property
    def writes(self) -> bool:
        return self.fault == "every rank writes" or not dist.is_initialized() or dist.get_rank() == 0

    def start(self, event: ev.TrainingStarts) -> None:
        if not self.writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() and event.step else []
        if self.fault == "starts a new file":
            lines = []
        if self.fault != "writes steps again":
            lines = [line for line in lines if json.loads(line).get("step", event.step + 1) <= event.step]
        self.path.write_text("".join(f"{line}\n" for line in lines))

    def count(self, event: ev.StepStarts) -> None:
        self.steps += 1
        self.samples = sum(len(microbatch["x"]) for microbatch in event.pack)

    def log(self, event: ev.ValuesLogged) -> None:
        if "tokens" not in event.values:
            return
        own = {"samples": self.samples} if self.fault == "writes the numbers of its rank" else {}
        self.write({"step": event.step, "tokens": event.values["tokens"], **own})

    def finish(self, event: ev.TrainingFinished) -> None:
        self.write({"steps": self.steps})

    def write(self, line: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def state(self) -> State:
        return {"steps": self.steps}

    def load_state(self, state: State) -> None:
        if self.fault != "forgets its count":
            self.steps = state["steps"]  # type: ignore[assignment]


@hookimpl
def d9d_subscribers() -> Iterator[SubscriberSpec]:
    yield SubscriberSpec(
        name="steps_file",
        summary="A line of JSON for each step.",
        config=Ref(f"{__name__}:StepsFileConfig"),
        build=Ref(f"{__name__}:StepsFile"),
    )
