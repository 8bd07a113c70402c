"""The page of the first hour shows every kind of ``d9d new job`` with the commands of its tool."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from d9d_data.new_job.kinds import KINDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "first-hour.md"


def test_the_page_has_the_commands_of_every_kind_in_order(tool: Callable[[str], ModuleType]) -> None:
    shown = {
        section.split("\n")[0]: re.findall(r"^\$ (.*?)    # \d+ s$", section, re.MULTILINE)
        for section in PAGE.read_text("utf-8").split("\n## ")[1:]
    }
    first = tool("first_hour")
    assert shown.keys() == first.KINDS.keys() == KINDS.keys()
    for kind, commands in shown.items():
        assert commands == [f"d9d new job {kind}{first.OPTIONS.get(kind, '')}", *first.KINDS[kind]]


def test_of_many_lines_about_steps_the_first_and_the_last_are_shown(tool: Callable[[str], ModuleType]) -> None:
    output = "\n".join(["data: text", *(f"step {n}/9  loss 1" for n in range(1, 10)), "x" * 130, "finished"])
    shown = list(tool("first_hour").shortened(output))
    assert shown[:5] == ["data: text", "step 1/9  loss 1", "step 2/9  loss 1", "...", "step 8/9  loss 1"]
    assert shown[5:] == ["step 9/9  loss 1", "x" * 117 + "...", "finished"]
