"""Faults of the kinds whose implementations stand in files of their own, because other processes load them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d9d_testing.suites.schedule import ScheduleSuite
from d9d_testing.suites.strategy import StrategySuite

HERE = Path(__file__).parent / "implementations"


class SoundSchedule(ScheduleSuite):
    plugin = str(HERE / "broken_schedules.py")
    target = "by_hand"
    ranks = (2, 3)
    settings = ({"fault": "none"},)
    test_it_is_made_without_torch = None  # a single file may import what it wants

    def most_held(self, ranks: int, microbatches: int, settings: Mapping[str, Any]) -> float:
        return microbatches

    def test_ranks_compute_at_the_same_time(self) -> None:
        if self.settings[0]["fault"] != "none":  # all forwards, then all backwards: sound, and a pipeline
            super().test_ranks_compute_at_the_same_time()


class SoundStrategy(StrategySuite):
    plugin = str(HERE / "broken_strategies.py")
    target = "by_hand"
    meshes = ({"dp_replicate": 2},)
    settings = ({"fault": "none"},)


def _settings(*faults: str) -> dict[str, tuple[dict[str, Any], str]]:
    return {fault.replace("_", " "): ({"settings": ({"fault": fault},)}, "") for fault in faults}


SCHEDULES = _settings(
    "forgets a backward",
    "one program too few",
    "an idle rank",
    "sends far ahead",
    "changes",
    "takes anything",
    "prints nothing",
    "one at a time",
    "reduces early",
    "crosses messages",
    "needs a microbatch for each rank",
)
STRATEGIES = _settings(
    "sums_nothing",
    "claims_and_does_not",
    "changes_numbers",
    "changes_random_numbers",
    "renames",
    "changes_shapes",
    "allocates",
    "changes_nothing",
    "invents_a_module",
    "invents_a_parameter",
    "invents_an_axis",
    "needs_few_ranks",
    "adds_state",
    "declares_no_collectives",
    "hides_a_collective",
    "invents_a_collective",
    "miscounts_a_collective",
    "sums_gradients_too",
    "acts_in_every_second_forward",
)
