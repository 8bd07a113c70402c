"""A sample of the campaign of hostile plugins: none ends a command with status 0, unnamed, or spoils JSON."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def campaign(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("plugin_campaign")


@pytest.mark.thorough
def test_a_few_hostile_plugins_break_no_rule(campaign: ModuleType) -> None:
    assert campaign.campaign(campaign.cases()[5::31]) == []


def test_no_text_of_a_hostile_plugin_controls_a_terminal(campaign: ModuleType) -> None:
    controls = ("ToyTask.losses, raises controls", "summary, controls", "ToyMetric.compute, names of controls")
    chosen = [case for case in campaign.cases() if f"{case.place}, {case.way}" in controls]
    assert len(chosen) == len(controls)
    assert campaign.campaign(chosen) == []


@pytest.mark.full
def test_every_fifth_hostile_plugin_breaks_no_rule(campaign: ModuleType) -> None:
    chosen = campaign.cases()[::5]
    assert len(chosen) > 35
    assert campaign.campaign(chosen) == []


@pytest.mark.slow
def test_no_hostile_plugin_breaks_a_rule(campaign: ModuleType) -> None:
    assert len(campaign.cases()) > 200
    assert campaign.campaign(campaign.cases()) == []
