"""Plugin of tools/elastic_campaign.py: toy data with sample numbers, and a task that records the samples it ran."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from d9d_core.config import PluginConfig
from d9d_core.plugin import DatasetSpec, Ref, TaskSpec, hookimpl
from pydantic import NonNegativeFloat

D9D_API = 2


class NumberedConfig(PluginConfig):
    """Toy data with the number of each sample."""

    name: Literal["numbered"] = "numbered"
    """Selects this dataset."""
    features: int = 16
    """Width."""


class RecordingConfig(PluginConfig):
    """Toy task that writes the samples of each attempt to a file."""

    name: Literal["recording"] = "recording"
    """Selects this task."""
    decay: float = 0.01
    """Coefficient of the mean squared output."""
    pause: NonNegativeFloat = 0.0
    """Seconds of each step, until the file ``fast`` exists beside the record."""


def dataset(config: NumberedConfig, context: Any) -> Any:
    """Build the dataset."""
    import torch
    from d9d_testing.toy.config import ToyDataConfig
    from d9d_testing.toy.data import ToyStream

    class Numbered(ToyStream):
        def next_pack(self) -> Any:
            first = self.state()["packs"] * context.batch_size
            first += context.rank * (context.batch_size // context.ranks)
            size = context.microbatch_size
            return [
                {**microbatch, "number": torch.arange(first + index * size, first + (index + 1) * size)}
                for index, microbatch in enumerate(super().next_pack())
            ]

    return Numbered(ToyDataConfig(features=config.features), context)


def task(config: RecordingConfig) -> Any:
    """Build the task."""
    from d9d_core import events as ev
    from d9d_testing.toy.config import ToyTaskConfig
    from d9d_testing.toy.task import ToyTask

    path = Path(os.environ["ELASTIC_RECORD"])

    class Recording(ToyTask):
        def __init__(self) -> None:
            super().__init__(ToyTaskConfig(decay=config.decay))
            self.ran: list[int] = []
            self.key = ""

        def losses(self, outputs: Any, microbatch: Any) -> Mapping[str, Any]:
            self.ran += microbatch["number"].tolist()
            return super().losses(outputs, microbatch)

        def subscriptions(self) -> Any:
            return [
                (ev.AttemptStarts, self.starts), (ev.ForwardBackwardEnds, self.ends), (ev.StepEnds, self.commits),
                (ev.CheckpointStarts, lambda event: self.write("save", step=event.step)),
            ]  # fmt: skip

        def starts(self, event: ev.AttemptStarts) -> None:
            self.ran, self.key = [], event.attempt.key
            self.write("attempt", step=event.step, replicas=list(event.attempt.replicas), source=event.attempt.source)
            if not path.with_name("fast").exists():
                time.sleep(config.pause)

        def ends(self, _event: ev.ForwardBackwardEnds) -> None:
            self.write("ran", numbers=self.ran)

        def commits(self, event: ev.StepEnds) -> None:
            self.write("commit", step=event.step)

        def write(self, what: str, **values: Any) -> None:
            line = {"event": what, "key": self.key, "process": os.getpid(), "time": time.time(), **values}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    return Recording()


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """Dataset with numbers."""
    yield DatasetSpec(
        name="numbered",
        summary="Toy data with sample numbers.",
        config=Ref(f"{__name__}:NumberedConfig"),
        build=Ref(f"{__name__}:dataset"),
        gives={"x": 2, "y": 2, "mask": 1, "number": 1},
    )


@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    """Task that records."""
    yield TaskSpec(
        name="recording",
        summary="Toy task that records the samples of each attempt.",
        config=Ref(f"{__name__}:RecordingConfig"),
        build=Ref(f"{__name__}:task"),
        reads={"x": 2, "y": 2, "mask": 1, "number": 1},
        observes={"absolute"},
    )
