"""Stacks of a process show its current functions."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_engine.supervision.stacks import _SHOWN, _describe_frame, doing

TORCH = Path(torch.__file__).parent


def seen_while(call: Callable[[], object]) -> str:
    """Stack of the main thread during the call, as another thread sees it."""
    found: list[str] = []

    def look() -> None:
        time.sleep(0.1)
        found.append(doing(TORCH).where)

    thread = threading.Thread(target=look)
    thread.start()
    call()
    thread.join()
    return found[0]


def test_a_call_that_has_no_frame_is_known_by_its_line() -> None:
    event = _Native()
    assert seen_while(lambda: event.wait(0.3)).startswith("waits in wait(...) at ")


def test_the_stack_of_a_training_thread_that_is_not_the_main_one_is_shown() -> None:
    began, ended = threading.Event(), threading.Event()

    def steps_of_a_run() -> None:
        began.set()
        ended.wait(30)

    thread = threading.Thread(target=steps_of_a_run)
    thread.start()
    began.wait(30)
    found = doing(TORCH, trains=thread)
    ended.set()
    thread.join()
    assert "steps_of_a_run" in re.findall(r", in (\w+)$", found.stack, re.MULTILINE)
    # The main thread takes the place of a thread that has ended.
    later = doing(TORCH, trains=thread).stack
    assert "steps_of_a_run" not in re.findall(r", in (\w+)$", later, re.MULTILINE)


#: Calls a function as torch's autograd does.
BACKWARD: dict[str, Any] = {}
exec(compile("def _engine_run_backward(call): call()", str(TORCH / "autograd" / "graph.py"), "exec"), BACKWARD)


def works_on(call: Callable[[], object]) -> None:
    call()


@pytest.mark.parametrize(
    ("calls", "seen"),
    [(BACKWARD["_engine_run_backward"], "waits in wait(...) at "), (works_on, "not in a collective, but at ")],
)
def test_a_thread_that_waits_hides_the_main_one_only_during_a_backward(calls: Any, seen: str) -> None:
    found: list[str] = []
    looked, ended = threading.Lock(), threading.Lock()

    def hold() -> None:
        native = SimpleNamespace(wait=ended.acquire)
        native.wait()

    def look() -> None:
        while not {"hold", calls.__name__} <= {frame.f_code.co_name for frame in sys._current_frames().values()}:
            pass
        found.append(doing(TORCH).where)
        looked.release()

    looked.acquire()
    ended.acquire()
    threads = [threading.Thread(target=hold), threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    calls(partial(looked.acquire, timeout=30))
    ended.release()
    for thread in threads:
        thread.join()
    assert found[0].startswith(seen)
    assert re.search(f" {'/'.join(Path(__file__).parts[-3:])}:\\d+ \\(", found[0])


class _Native:
    """Waits in C, as a collective's handle does."""

    wait = staticmethod(time.sleep)


def test_user_code_called_by_torch_is_user_code() -> None:
    class Sleeps(torch.nn.Module):
        def forward(self) -> None:
            time.sleep(0.3)

    where = seen_while(Sleeps())
    assert where.startswith("not in a collective, but at ")
    assert where.endswith("(forward)")


def test_a_stack_begins_with_the_outermost_of_its_innermost_frames() -> None:
    def even(deep: int) -> str:
        return odd(deep - 1) if deep else inner()

    def odd(deep: int) -> str:
        return even(deep - 1)

    def inner() -> str:
        return _describe_frame(sys._getframe(), TORCH).stack

    lines = [line for line in even(60).splitlines() if line.startswith("  File ")]
    assert [line.rpartition(" in ")[2] for line in lines] == [*["odd", "even"] * 12, "inner"]
    assert _SHOWN == 24
