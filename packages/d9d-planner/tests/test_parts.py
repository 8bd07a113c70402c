"""Pieces of the planner: times of collectives, devices, and activations in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
from d9d_core.errors import JobError
from d9d_core.program.text import parse_programs
from d9d_core.schedule import single_stage
from d9d_planner.device import Device
from d9d_planner.live import Moment, moments
from d9d_planner.network import Group, seconds
from d9d_planner.options import divisors

DEVICE = Device.named("h200").model_copy(update={"link_latency": 0.0, "network_latency": 0.0})
GIB = float(2**30)


def test_one_rank_communicates_nothing() -> None:
    assert seconds("all_reduce", GIB, Group(1), DEVICE) == 0.0


def test_an_all_reduce_takes_as_long_as_a_reduce_scatter_and_an_all_gather() -> None:
    parts = seconds("reduce_scatter", GIB, Group(8), DEVICE) + seconds("all_gather", GIB, Group(8), DEVICE)
    assert seconds("all_reduce", GIB, Group(8), DEVICE) == pytest.approx(parts)
    assert parts == pytest.approx(2 * GIB * 7 / 8 / DEVICE.link)


def test_ranks_of_a_machine_share_what_the_network_brings() -> None:
    """16 neighbours have 8 network ports on each machine, 16 ranks on 16 machines one each."""
    near, far = Group(16), Group(16, stride=8)
    linked = DEVICE.model_copy(update={"link": 1e15})
    assert seconds("all_gather", GIB, near, linked) == pytest.approx(GIB / 2 / 8 / DEVICE.network)
    assert seconds("all_gather", GIB, near, DEVICE) == pytest.approx(GIB * 15 / 16 / DEVICE.link)  # slower than that
    assert seconds("all_gather", GIB, far, linked) == pytest.approx(GIB * 15 / 16 / DEVICE.network)


def test_an_all_to_all_between_machines_crosses_the_network_with_all_that_leaves() -> None:
    assert seconds("all_to_all", GIB, Group(8), DEVICE) == pytest.approx(GIB * 7 / 8 / DEVICE.link)
    assert seconds("all_to_all", GIB, Group(16), DEVICE) == pytest.approx(GIB / 2 / DEVICE.network)


def test_stages_on_other_machines_send_over_the_network() -> None:
    assert seconds("send", GIB, Group(2, stride=4), DEVICE) == pytest.approx(GIB / DEVICE.link)
    assert seconds("send", GIB, Group(2, stride=8), DEVICE) == pytest.approx(GIB / DEVICE.network)


def test_far_machines_add_latency() -> None:
    device = Device.named("h200")
    assert seconds("all_gather", 1.0, Group(64), device) > seconds("all_gather", 1.0, Group(8), device) > 0


def test_a_file_describes_a_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(Device.named("h100").model_copy(update={"node": 4}).model_dump_json())
    assert Device.named(str(path)).node == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "neither a known device"),
        ("- 1", "is not a mapping of a device's fields"),
        ("node: 8", "memory_gib"),
        ("a: [", "readable"),
    ],
)
def test_a_wrong_device_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobError, match=message):
        Device.named(str(path))


def test_gradients_exist_from_the_second_microbatch_on() -> None:
    found = moments(single_stage(1, 3)[0])
    assert found == [Moment(((0, 1),), 0, frozenset({0}))]


def test_the_first_rank_of_1f1b_holds_as_many_microbatches_as_there_are_ranks() -> None:
    text = "F0.0 S>0.0 F0.1 S>0.1 R<0.0 B0.0 R<0.1 B0.1 R0\nR>1.0 F1.0 R>1.1 B1.0 S<1.0 F1.1 B1.1 S<1.1 R1"
    first, last = (moments(program) for program in parse_programs(text))
    assert [moment.held for moment in first] == [((0, 2),), ((0, 1),)]
    assert {moment.held for moment in last} == {((1, 1),)}


def test_divisors_ascend() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
