"""Meshes against the machines that share a job."""

from __future__ import annotations

import pytest
from d9d_core.errors import D9dError, JobError
from d9d_engine.machines import require_whole_groups, sizes_named


@pytest.mark.parametrize(
    ("tp", "nodes", "processes"), [(1, 2, 3), (3, 2, 3), (6, 2, 3), (2, 1, 3), (4, 2, 8), (8, 4, 2)]
)
def test_groups_within_a_machine_or_over_whole_machines_are_accepted(tp: int, nodes: int, processes: int) -> None:
    require_whole_groups(tp, nodes, processes)


@pytest.mark.parametrize(("tp", "nodes", "processes"), [(2, 2, 3), (4, 2, 6), (6, 3, 4)])
def test_groups_that_machines_would_share_unevenly_are_refused(tp: int, nodes: int, processes: int) -> None:
    with pytest.raises(
        JobError, match=rf"mesh\.tp is {tp}, but each of the {nodes} machines has {processes} processes"
    ):
        require_whole_groups(tp, nodes, processes)


@pytest.mark.parametrize(
    ("needed", "nodes", "notes"),
    [
        (6, 2, ["2 machines with 4 processes each are 8; give --nproc 3"]),
        (9, 2, ["2 machines with 4 processes each are 8; give --nodes 1 or 3"]),
        (8, 2, []),
        (6, 1, []),
    ],
)
def test_an_error_about_the_number_of_processes_names_the_option(needed: int, nodes: int, notes: list[str]) -> None:
    with pytest.raises(D9dError, match="another error") as caught, sizes_named(needed, nodes, 4, "--nproc"):
        raise JobError("another error")
    assert getattr(caught.value, "__notes__", []) == notes
