"""A sample of the campaign of hostile plugins: none ends a command with status 0, unnamed, or spoils JSON."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "plugin_campaign.py"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plugin_campaign", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plugin_campaign"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_few_hostile_plugins_break_no_rule(tool: ModuleType) -> None:
    assert tool.campaign(tool.cases()[5::31]) == []


@pytest.mark.thorough
def test_every_fifth_hostile_plugin_breaks_no_rule(tool: ModuleType) -> None:
    chosen = tool.cases()[::5]
    assert len(chosen) > 35
    assert tool.campaign(chosen) == []


@pytest.mark.slow
def test_no_hostile_plugin_breaks_a_rule(tool: ModuleType) -> None:
    assert len(tool.cases()) > 200
    assert tool.campaign(tool.cases()) == []
