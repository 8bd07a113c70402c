"""A few rounds of the campaign that ends processes of a job at random moments."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = pytest.mark.tools


@pytest.fixture(scope="module")
def campaign(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("kill_campaign")


@pytest.mark.full
def test_a_few_rounds_end_as_the_undisturbed_run(campaign: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--kill", "1", "--term", "1", "--stop", "1", "--seed", "3"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_whole_campaign_ends_as_the_undisturbed_run(campaign: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        assert campaign.main(["--kill", "200", "--term", "50", "--stop", "20", "--fill", "20"]) == 0


def test_a_round_is_the_same_for_a_seed_whatever_else_runs(campaign: ModuleType) -> None:
    plans = [campaign.Plan.choose(fault, number, 1) for fault in campaign.FAULTS for number in range(40)]
    assert plans == [campaign.Plan.choose(plan.fault, plan.number, 1) for plan in plans]
    assert {plan.moment for plan in plans} == set(campaign.MOMENTS)
    assert plans[0] != campaign.Plan.choose(plans[0].fault, 0, 2)
