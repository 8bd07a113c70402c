"""Runs with all trackers on that are killed: what each tracker has is complete, and has no step twice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "tracker_campaign.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tracker_campaign", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = loaded()


def test_the_comparison_finds_what_is_lacking_twice_or_wrong() -> None:
    expected = [(1, "loss", 1.0), (2, "loss", 2.0), (3, "loss", 3.0), (1, "only", 0.0)]
    found = [(1, "loss", 1.0), (1, "loss", 1.0), (3, "loss", 3.5)]
    assert sorted(tool.compare("mine", 3, expected, found)) == [
        "mine: loss: twice [1], lacking [2], wrong [3]",
        "mine: only: twice [], lacking [1, 2, 3], wrong []",
    ]
    assert tool.compare("mine", 1, expected[:1], found[:1]) == []
    assert tool.compare("mine", 3, expected, expected[:3], {"only"}) == []
    assert tool.compare("mine", 3, expected[:3], [expected[1], expected[0], expected[2]]) == [
        "mine: loss: twice [], lacking [], wrong [], not in the order of steps"
    ]


def test_series_that_share_a_name_and_names_that_share_a_series_are_found() -> None:
    entries = [tool.Entry("text", 1, "a", 10_001.0), tool.Entry("text", 2, "a", 20_002.0)]
    points, mixed = tool.points_of("mine", [*entries, tool.Entry("text", 8, "b", 10_008.0)])
    assert points == [(1, "text of word 0", 1.0), (2, "text of word 1", 2.0), (8, "text of word 0", 8.0)]
    assert mixed == [
        "mine: 'text a' holds ['text of word 0', 'text of word 1']",
        "mine: text of word 0 is ['a', 'b']",
    ]


def test_notes_name_the_series_that_a_tracker_refuses() -> None:
    note = "warning: tracker 'mine' refuses the text 'half %D800', which is no longer sent: OSError()\n"
    word = tool.WORDS.index("half \ud800")
    assert tool.refusals("mine", note * 2, 2) == ({f"text of word {word}"}, [])
    assert tool.refusals("mine", note * 3, 2)[1] == ["mine: ('text', \"'half %D800'\"): 3 notes"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="kills groups of processes")
def test_every_series_is_complete_after_kills(tmp_path: Path) -> None:
    said: list[str] = []
    problems = tool.campaign(tmp_path, 2, 1, list(tool.SECTIONS), said.append)
    assert problems == [], said
    assert sum("kill" in line for line in said) == 2
