"""Stacks of this process's threads: the activity of the training thread, and whether it waits for other ranks.

Imports no torch.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType

#: Names of torch's wrapper functions around collectives.
_WRAPPERS = frozenset({"wrapper", "inner", "_fn", "wrapped", "decorate_context", "func", "new_fn"})
#: Beginning of the training thread's ``where`` while autograd's own threads run a backward on an accelerator.
_IN_BACKWARD = "in torch's _engine_run_backward"
#: Calls that wait for a collective or for the device.
_WAITING = re.compile(r"\b(wait|synchronize|item|tolist|cpu)\(")
#: Largest number of frames in a shown stack: enough to see the call, without the frames of the command line.
_SHOWN = 24


@dataclass(frozen=True, slots=True)
class Doing:
    """Activity of a thread: the code that it runs now.

    Attributes:
        where: one-line description, for comparing ranks.
        waits: whether the thread waits for a collective or the device, as far as Python can tell.
        stack: stack of the described thread, outermost frame first.
    """

    where: str
    waits: bool
    stack: str


def doing(
    torch_home: Path, waited_for: threading.Thread | None = None, trains: threading.Thread | None = None
) -> Doing:
    """Describe the current activity of the training thread or, if it waits for another thread, of that thread.

    In a backward on an accelerator, the training thread waits for a thread of autograd, which is found by its stack.

    Args:
        torch_home: directory of the torch package.
        waited_for: thread that the training thread waits for, if known.
        trains: training thread. The main thread is described instead if this is ``None`` or the thread has ended.
    """
    frames = sys._current_frames()  # noqa: SLF001 - documented for debugging
    main = threading.main_thread().ident if trains is None or trains.ident not in frames else trains.ident
    assert main is not None
    found = _describe_frame(frames[main], torch_home)
    if waited_for is not None and waited_for.ident in frames:  # otherwise the thread has ended
        return _describe_frame(frames[waited_for.ident], torch_home)
    if not found.where.startswith(_IN_BACKWARD):  # otherwise background threads could hide the training thread
        return found
    others = [_describe_frame(frame, torch_home) for ident, frame in frames.items() if ident != main]
    return next((one for one in others if one.waits), found)


def _describe_frame(frame: FrameType, torch_home: Path) -> Doing:
    frames = list(traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False))  # innermost first
    inside = list(takewhile(lambda one: Path(one.filename).is_relative_to(torch_home), frames))
    caller = frames[min(len(inside), len(frames) - 1)]
    line = f"{_short(caller.filename)}:{caller.lineno} ({caller.name})"
    stack = "".join(traceback.StackSummary.from_list(frames[_SHOWN::-1]).format())
    distributed = [one.name for one in inside if Path(one.filename).is_relative_to(torch_home / "distributed")]
    if distributed:
        # The innermost function of torch.distributed is the collective, or FSDP's wait.
        name = next((name for name in distributed if name not in _WRAPPERS), distributed[0])
        return Doing(f"waits in {name}, called at {line}", True, stack)
    if inside:
        return Doing(f"in torch's {inside[0].name}, called at {line}", False, stack)
    # C++ functions have no frame; only the source line shows the call.
    if match := _WAITING.search(caller.line or ""):
        return Doing(f"waits in {match[0]}...) at {line}", True, stack)
    return Doing(f"not in a collective, but at {line}", False, stack)


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-3:])
