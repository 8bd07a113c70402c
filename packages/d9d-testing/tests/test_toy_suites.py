"""The toy plugin keeps what holds for every component: whoever starts from it starts from something sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from d9d_testing.suites.dataset import DatasetSuite
from d9d_testing.suites.metric import MetricSuite
from d9d_testing.suites.optimizer import OptimizerSuite
from d9d_testing.suites.peft import PeftSuite
from d9d_testing.suites.subscriber import SubscriberSuite
from d9d_testing.suites.task import TaskSuite
from d9d_testing.suites.tracker import TrackerSuite

TOY = "d9d_testing.toy.plugin"


class TestOptimizer(OptimizerSuite):
    plugin = TOY
    target = "toy_optimizer"
    dtypes = ("float32",)


class TestMetric(MetricSuite):
    plugin = TOY
    target = "toy_metric"


class TestData(DatasetSuite):
    plugin = TOY
    target = "toy_data"
    other: ClassVar = {"features": 6}


class TestTokens(DatasetSuite):
    plugin = TOY
    target = "toy_tokens"


class TestTask(TaskSuite):
    plugin = TOY
    target = "toy_task"
    config: ClassVar = {"decay": 0.1}
    observes = ("absolute",)
    accepts = ({"features": 4}, {"features": 4})
    rejects = (({"features": 4}, {"features": 6}),)


class TestTracker(TrackerSuite):
    plugin = TOY
    target = "toy_tracker"

    def fields(self, directory: Path) -> Mapping[str, Any]:
        return {"path": str(directory / "calls")}

    def broken_fields(self, directory: Path) -> Mapping[str, Any]:
        return {"fails_in": "write"}


class TestAdapter(PeftSuite):
    plugin = TOY
    target = "toy_adapter"
    matches_nothing: ClassVar = {"match": "absent"}


class TestRecorder(SubscriberSuite):
    plugin = TOY
    target = "toy_recorder"

    def fields(self, directory: Path) -> Mapping[str, Any]:
        return {"path": str(directory / "events")}

    def broken_fields(self, directory: Path) -> Mapping[str, Any]:
        return {"path": str(directory / "missing" / "events")}
