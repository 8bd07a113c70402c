"""Causes of failures: the one among its consequences, its exit status, and where an agent of torchrun finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import PluginError
from d9d_engine.launch.agent import cause
from d9d_engine.launch.ranks import Rank
from d9d_engine.supervision import together
from d9d_engine.supervision.failure import ErrorFile, Failure, OtherRankError

BROKEN = Failure("rank 0 failed:\nRuntimeError: Connection closed by peer", 1, second_hand=True)
OWN = Failure("rank 1 failed:\nValueError: mine", 1)


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ({0: {"failure": BROKEN}, 1: {"failure": OWN}}, "ValueError: mine"),
        ({0: {"failure": BROKEN}, 1: {"exit_code": -9}}, "rank 1 (x) on {node} was killed by SIGKILL"),
        ({0: {"echoes": "rank 1 (x)"}, 1: {"exit_code": -11}}, "rank 1 (x) on {node} was killed by SIGSEGV"),
        ({0: {"exit_code": -15}, 1: {"failure": OWN}}, "ValueError: mine"),
        ({0: {"failure": BROKEN}, 1: {"exit_code": 7}}, "rank 1 (x) on {node} ended with exit status 7"),
        ({0: {"echoes": "rank 1 (x)"}, 1: {"failure": BROKEN}}, "Connection closed"),
        ({0: {"exit_code": -15}}, "rank 0 (x) on {node} was killed by SIGTERM"),
        ({0: {"exit_code": -9, "ended": 2}, 1: {"exit_code": -6, "ended": 1}}, "rank 1 (x) on {node} was killed by"),
    ],
)
def test_the_cause_is_found_among_its_consequences(failures: dict[int, dict[str, Any]], text: str) -> None:
    import platform

    nothing: Any = None
    failed = [Rank(rank, nothing, nothing, **({"exit_code": 1} | facts)) for rank, facts in failures.items()]
    assert text.format(node=platform.node()) in cause(failed, lambda rank: f"rank {rank} (x)").text


@pytest.mark.parametrize(
    ("others", "status", "text"),
    [
        ([[1, "rank 0 on a", "ValueError: x"]], 1, "rank 0 on a: ValueError: x"),
        ([[1, "rank 0 on a", "x"], [2, "rank 1 on b", "y"], [1, "rank 2 on c", "z"]], 2, "rank 1 on b: y"),
        ([[1, "rank 0 on a", "x"], [1, "rank 1 on b", "y"]], 1, "rank 0 on a: x"),
    ],
)
def test_a_failure_of_another_rank_is_named_and_an_error_of_the_job_before_others(
    others: list[list[Any]], status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def exchange(own: Any, group: object) -> list[Any]:
        assert group == "group"
        told.append(own)
        return [*others, own, None]

    monkeypatch.setattr(together, "all_gather_objects", exchange)
    group: Any = "group"
    with pytest.raises(OtherRankError) as caught:
        together.fail_together(lambda: None, "rank 3 on d", group)
    assert (str(caught.value), caught.value.exit_code) == (text, status)

    def fail() -> None:
        raise PluginError("no plugin")

    with pytest.raises(PluginError, match="no plugin"):
        together.fail_together(fail, "rank 3 on d", group)
    assert told == [None, [2, "rank 3 on d", "no plugin"]]
    others.clear()
    together.fail_together(lambda: None, "rank 3 on d", group)


def test_errors_keep_their_exit_status() -> None:
    nothing: Any = None
    failure = Failure.of(PluginError("d9d-moe is missing"))
    assert cause([Rank(0, nothing, nothing, failure=failure, exit_code=2)], str).exit_code == 2


@pytest.mark.thorough
def test_an_agent_finds_the_cause_in_its_file(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    ErrorFile(tmp_path / "error").failed(Failure.of(PluginError("d9d-moe is missing")))
    process = ProcessFailure(0, 1, 1, str(tmp_path / "error"))
    assert process.message["extraInfo"]["py_callstack"] == "error: d9d-moe is missing"  # type: ignore[index]
