"""Limits and constants of predictions that the manual states."""

from __future__ import annotations

import inspect
from datetime import timedelta

from d9d_planner import calibrate, check, command, memory, plugin, search, workload
from d9d_planner.device import Device
from d9d_planner.links import worker
from d9d_planner.network import Group


def test_searches_and_measurements_have_the_documented_limits() -> None:
    assert (search._MOST_STAGES, search._MOST_CONTEXT, search._MOST_MICROBATCH) == (32, 64, 16)
    assert (search._CERTAIN, search._EXAMINED, search._SMALL) == (20, 400, 2)
    assert (check._SHOWN, check._MORE_DEVICES) == (3, (2, 4, 8))
    assert (7, 7, timedelta(minutes=2)) == (calibrate._REPEATS, worker._REPEATS, worker._PATIENCE)
    assert worker._SIZES == {True: 268_435_456, False: 4_194_304}


def test_predictions_count_the_driver_communicators_and_gathered_blocks() -> None:
    assert (memory._CONTEXT, memory._COMMUNICATOR) == (0.7 * 2**30, 0.25 * 2**30)
    assert memory._GATHERED_BLOCKS == 2
    assert workload._WIDTHS == {"float32": 4, "bfloat16": 2}
    assert Device.model_fields["node"].default == 8
    assert Group.__dataclass_fields__["stride"].default == 1


def test_the_memory_that_a_job_must_fit_into_is_for_the_prediction() -> None:
    (declared,) = plugin.d9d_job_checks()
    assert (declared.name, declared.memory) == ("prediction", True)


def test_plan_prints_ten_layouts_and_takes_the_installed_plugins_unless_told_otherwise() -> None:
    defaults = {name: one.default for name, one in inspect.signature(command.plan).parameters.items()}
    assert (defaults["top"], defaults["no_plugins"], defaults["strict_plugins"]) == (10, False, False)
