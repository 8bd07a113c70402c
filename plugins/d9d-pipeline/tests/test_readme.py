"""The README's table and pictures equal the schedules' results, and are no worse than torch's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from d9d_core.plugin import ScheduleSpec
from d9d_core.registry.registry import Registry
from d9d_pipeline import plugin
from d9d_pipeline.simulator.costs import Costs

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text()


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """Definitions of the script."""
    return runpy.run_path(str(HERE / "schedule_table.py"))


@pytest.fixture(scope="module")
def pairs(made: dict[str, Any]) -> list[Any]:
    """Our programs and torch's."""
    pytest.importorskip("torch.distributed.pipelining")
    return list(made["pairs"]())


@pytest.fixture(scope="module")
def cells(pairs: list[Any]) -> list[Any]:
    """Theoretical times."""
    return [pair.simulate() for pair in pairs]


@pytest.mark.full
def test_the_table_is_up_to_date(made: dict[str, Any], cells: list[Any]) -> None:
    _, inside, _ = made["between"](README)
    assert inside.strip() == made["table"](cells), "run: python plugins/d9d-pipeline/tests/schedule_table.py"


@pytest.mark.full
def test_the_pictures_are_up_to_date(made: dict[str, Any]) -> None:
    for name, text in made["pictures"]().items():
        assert (HERE.parent / "pictures" / name).read_text() == text, name


def assert_no_worse(cells: list[Any]) -> None:
    for cell in cells:
        where = f"{cell.entry.name}, {cell.ranks} ranks, {cell.microbatches} microbatches"
        assert cell.ours.makespan <= cell.theirs.makespan + 1e-9, where
        assert max(cell.ours.peak_live) <= max(cell.theirs.peak_live) + 1e-9, where
    assert len(cells) == 9 * 4 * 3 - 4


@pytest.mark.full
def test_no_schedule_is_slower_or_larger_than_that_of_torch(cells: list[Any]) -> None:
    assert_no_worse(cells)


@pytest.mark.full
@pytest.mark.parametrize(
    "costs", [Costs(transfer=0.1), Costs(1.0, 2.3, 0.9, 0.05, overlap=0.5)], ids=["even", "uneven"]
)
def test_nor_where_transfers_take_time(pairs: list[Any], costs: Costs) -> None:
    assert_no_worse([pair.simulate(costs) for pair in pairs])


@pytest.mark.full
def test_ours_agree_with_the_papers_wherever_those_say_something(cells: list[Any]) -> None:
    for cell in cells:
        for ours, paper, _ in (cell.bubbles, cell.held):
            assert paper in (ours, "-"), f"{cell.entry.name}, {cell.ranks} ranks, {cell.microbatches} microbatches"


def test_it_names_every_schedule_with_the_default_of_its_field() -> None:
    rows = dict(re.findall(r"^\| `pipeline` \| `(\w+)` \| ([^|]+) \|", README, re.MULTILINE))
    specs = [entry.spec for entry in Registry.of(plugin).entries("schedule")]
    assert rows.keys() == {spec.key for spec in specs}
    for spec in specs:
        assert isinstance(spec, ScheduleSpec)
        fields = spec.config.load().model_fields
        if "stages_per_rank" in fields:
            assert rows[spec.name] == f"`stages_per_rank`, {fields['stages_per_rank'].default} by default"
