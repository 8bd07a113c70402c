"""Names are what people type into job files: lower case, digits, underscores; a schedule may be called 1f1b."""

from __future__ import annotations

import pytest
from d9d_core.plugin import CapabilitySpec, Ref, ScheduleSpec


def named(name: str) -> ScheduleSpec:
    return ScheduleSpec(name=name, summary="x", config=Ref("json:loads"), build=Ref("json:loads"))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p", "z_loss_lm.v2", "a"])
def test_a_name_has_letters_digits_and_underscores(name: str) -> None:
    assert named(name).key == name


@pytest.mark.parametrize("name", ["", "1", "12", "1F1B", "_a", "a-b", "a b", "a.v", "a.b", "1_"])
def test_a_name_that_yaml_or_people_would_misread_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="use lower-case letters, digits and underscores"):
        named(name)


@pytest.mark.parametrize("summary", ["\x1b]0;x\x07", "red \x9b31m", "turned \u202e", "begins\ranew"])
def test_a_summary_that_controls_a_terminal_is_refused(summary: str) -> None:
    reference = Ref("json:loads")
    with pytest.raises(ValueError, match="has a summary with characters that control a terminal: '") as refused:
        ScheduleSpec(name="a", summary=summary, config=reference, build=reference)
    assert str(refused.value).isprintable()
    with pytest.raises(ValueError, match="capability 'a:b' has a summary with characters that control a terminal"):
        CapabilitySpec(token="a:b", summary=summary)
