"""A single-file plugin: a schedule with a fault of choice. For the tests of the schedule suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Literal

from d9d_core.config import PluginConfig
from d9d_core.plugin import Ref, ScheduleSpec, hookimpl
from d9d_core.program.text import parse_programs
from d9d_core.schedule import Program, Reduce

Fault = Literal[
    "none",
    "forgets a backward",
    "one program too few",
    "an idle rank",
    "sends far ahead",
    "changes",
    "takes anything",
    "prints nothing",
    "one at a time",
    "reduces early",
    "crosses messages",
    "needs a microbatch for each rank",
]


class ByHandConfig(PluginConfig):
    """All forwards, then all backwards."""

    name: Literal["by_hand"] = "by_hand"
    """Selects the schedule."""
    fault: Fault = "none"
    """Fault of the schedule."""


class Silent(Reduce):
    """Prints as nothing that can be read back."""

    def __str__(self) -> str:
        return "?"


calls = count()


def build(config: ByHandConfig) -> Callable[[int, int], Sequence[Program]]:
    return partial(by_hand, config.fault)


def by_hand(fault: Fault, ranks: int, microbatches: int) -> Sequence[Program]:
    if microbatches < 1 and fault != "takes anything":
        raise ValueError("at least 1 microbatch")
    if fault == "needs a microbatch for each rank" and microbatches < ranks:
        raise IndexError("list index out of range")
    stages = ranks - 1 if fault == "an idle rank" else ranks
    lines = [line(stage, stages, microbatches, fault) for stage in range(stages)]
    if fault == "one program too few":
        lines.pop()
    if fault == "changes" and next(calls) % 2:
        lines[0] = line(0, stages, microbatches, "one at a time")
    programs = parse_programs("\n".join(lines))
    if fault == "an idle rank":
        programs.append(())
    if fault == "prints nothing":
        programs[0] = (*programs[0][:-1], Silent(0))
    return programs


def line(stage: int, stages: int, microbatches: int, fault: str) -> str:
    first, last = stage == 0, stage == stages - 1
    alternate = fault == "one at a time" or (fault == "sends far ahead" and last and not first)
    forwards, backwards = [], []
    for m in range(microbatches):
        name = f"{stage}.{m}"
        forwards.append(" ".join(["" if first else f"R>{name}", f"F{name}", "" if last else f"S>{name}"]))
        backwards.append(" ".join(["" if last else f"R<{name}", f"B{name}", "" if first else f"S<{name}"]))
    if fault == "forgets a backward":
        backwards[-1] = backwards[-1].replace(f"B{stage}.{microbatches - 1}", "")
    if fault == "reduces early":
        backwards.insert(-1, f"R{stage}")
    if fault == "crosses messages" and not first and microbatches > 1:
        forwards[0], forwards[1] = forwards[1], forwards[0]
    pairs = [action for pair in zip(forwards, backwards, strict=True) for action in pair]
    last_action = [] if fault == "reduces early" else [f"R{stage}"]
    return " ".join([*(pairs if alternate else forwards + backwards), *last_action])


@hookimpl
def d9d_schedules() -> Iterator[ScheduleSpec]:
    yield ScheduleSpec(
        name="by_hand",
        summary="All forwards, then all backwards.",
        config=Ref(f"{__name__}:ByHandConfig"),
        build=Ref(f"{__name__}:build"),
    )
