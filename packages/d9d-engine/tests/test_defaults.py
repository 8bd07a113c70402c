"""Defaults of the engine's functions and records, and limits that its manuals state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import timedelta
from typing import Any

import pytest
from d9d_core.grid import AXES
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.compose import adapter
from d9d_engine.compose.assemble import assemble
from d9d_engine.compose.kernels import KernelChoice
from d9d_engine.compose.parts.data import open_data
from d9d_engine.compose.plan import MemoryEstimate
from d9d_engine.compose.pretrained import listed
from d9d_engine.compose.root import Root
from d9d_engine.distributed.mesh import Topology
from d9d_engine.figures import figure_svg
from d9d_engine.job import Job
from d9d_engine.launch import process
from d9d_engine.launch.ranks import Rank
from d9d_engine.launch.start import start_up
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.checkpointer import Checkpointer, Progress
from d9d_engine.run.logbook import Logbook, Skips
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.run.progress import ProgressBar
from d9d_engine.sleep.offload import offload
from d9d_engine.sparklines import sparklines
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.tied import Tie
from d9d_engine.subscribers.config import EarlyStoppingConfig
from d9d_engine.supervision import compilation
from d9d_engine.supervision.failure import Failure
from d9d_engine.trackers import hub, lines
from d9d_engine.trackers.lines import LineFile


def of_call(function: Callable[..., Any]) -> dict[str, Any]:
    """Defaults of a function that are numbers or truth values."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if isinstance(one.default, int | float | timedelta)}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Checkpoint.load_into, {"only": False}),
        (CheckpointStore.__init__, {"asynchronous": False, "timeout": timedelta(hours=1), "tolerate": 0}),
        (assemble, {"trains": True}),
        (open_data, {"one_pass": False}),
        (listed, {"shown": 5}),
        (Root.open_data, {"one_pass": False}),
        (Topology.main_first, {"per_machine": False}),
        (figure_svg, {"dpi": 200}),
        (Job.plan, {"rank": 0}),
        (Job.build, {"owning": False}),
        (start_up, {"alone": False}),
        (Checkpointer.save, {"wait": False}),
        (DevicePrefetcher.__init__, {"prefetch": 2}),
        (ProgressBar.__init__, {"shown": True}),
        (offload, {"pin_memory": True}),
        (sparklines, {"width": 60}),
        (Gradients.before_backward, {"stage": 0, "complete": True}),
        (Gradients.__init__, {"bucket_mib": 32}),
        (Logbook.__init__, {"max_skipped": 10, "tokens": 0, "max_pending": 2}),
        (LineFile.__init__, {"lazy": False}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_calls_that_leave_out_an_argument_mean_the_documented_one(
    function: Callable[..., Any], expected: dict[str, Any]
) -> None:
    assert of_call(function) == expected


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (KernelChoice, {"compiled": False}),
        (MemoryEstimate, {"frozen": 0, "host": 0}),
        (Rank, {"training": False, "done": False, "ended": 0, "done_at": float("inf")}),
        (
            ProcessEnv,
            {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1},
        ),
        (Progress, {"step": 0, "tokens": 0}),
        (Skips, {"total": 0, "in_a_row": 0, "first": 0, "began": 0}),
        (Tie, {"trains": True}),
        (Failure, {"exit_code": 1, "second_hand": False}),
        (
            Topology,
            {"rank": 0, "world_size": 1, "local_rank": 0, "node_rank": 0, "num_nodes": 1, "simulated": False},
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_records_have_the_documented_defaults(record: type[Any], expected: dict[str, Any]) -> None:
    given = {one.name: one.default for one in fields(record) if one.default is not MISSING}
    assert {name: value for name, value in given.items() if isinstance(value, int | float)} == expected


def test_one_process_has_one_rank_on_each_axis() -> None:
    assert Topology().sizes == dict.fromkeys(AXES, 1) | {"ep": 1}


def test_limits_are_those_of_the_manuals() -> None:
    assert EarlyStoppingConfig.model_fields["patience"].default == 3
    assert process.ENDED == 143  # as a shell reports SIGTERM
    assert compilation.FREE_STEPS == 3
    assert hub.ROOM == 1000
    assert lines.ROOM == 16_777_216
    assert adapter._ONE_FILE > 2**60  # no adapter is split
