"""Agreement of ranks about failures: a failure on one rank raises an error with the same text on all ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from d9d_core.errors import CheckpointError
from torch import distributed as dist

from d9d_weights.sharding.collectives import all_gather_objects

T = TypeVar("T")


def on_all(
    action: Callable[[], T], group: dist.ProcessGroup | None, of_storage: type[CheckpointError] = CheckpointError
) -> T:
    """Run a function on every rank; if it fails on any rank, raise on all. Collective over ``group``.

    Args:
        action: function to run.
        group: process group of all ranks; ``None`` for one process.
        of_storage: type of the raised error if a file system failed.

    Raises:
        CheckpointError: the function failed on some rank; the text is the same on every rank.
    """
    result, error = _attempt(action)
    told = all_gather_objects(None if error is None else (_said(error, group), isinstance(error, OSError)), group)
    problems = [problem for problem in told if problem is not None]
    if problems:
        kind = of_storage if any(stored for _, stored in problems) else CheckpointError
        raise kind(_joined(text for text, _ in problems)) from error
    return result  # type: ignore[return-value] # nothing failed


def on_main(
    action: Callable[[], Any], group: dist.ProcessGroup | None, of_storage: type[CheckpointError] = CheckpointError
) -> Any:
    """Run a function on the first rank, and return its JSON value on all ranks. Collective over ``group``.

    Args:
        action: function to run.
        group: process group of all ranks; ``None`` for one process.
        of_storage: type of the raised error if a file system failed.

    Raises:
        CheckpointError: the function failed; the text is the same on every rank.
    """
    is_main = group is None or dist.get_rank(group) == 0
    result, error = _attempt(action) if is_main else (None, None)
    text = json.dumps([result, None if error is None else reason(error), isinstance(error, OSError)])
    value, problem, stored = json.loads(text if group is None else _broadcast(text, group))
    if problem is not None:
        raise (of_storage if stored else CheckpointError)(problem) from error
    return value


def reason(error: BaseException) -> str:
    """Text of an error in one line, with its type except for CheckpointErrors and OSErrors.

    Errors of several ranks that torch collected in one error are listed with their ranks.
    """
    if (failures := collected_failures(error)) is not None:
        return _joined(_ranked(failure, rank) for rank, failure in sorted(failures.items()))
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError | OSError) and text else f"{type(error).__name__}: {text}"


def collected_failures(error: BaseException) -> dict[int, BaseException] | None:
    """Failures by rank, if torch's checkpoint functions collected them in this error; ``None`` for other errors.

    The function does not import torch's checkpoint module: if the module is not imported, it cannot have raised.
    """
    module = sys.modules.get("torch.distributed.checkpoint.api")
    if module is None or not isinstance(error, module.CheckpointException):
        return None
    return {rank: failure for rank, (failure, _) in error.failures.items()}


def is_known_to_all(error: BaseException, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks know of an error of torch's checkpoint functions.

    With several ranks, torch collects failures to read or write a checkpoint on all ranks. Other errors are failed
    connections to a rank that may have died: the checkpoint is intact, and the run should restart.
    """
    return collected_failures(error) is not None or (group is None and isinstance(error, Exception))


def _broadcast(text: str, group: dist.ProcessGroup) -> str:
    """Broadcast a text from the first rank of the group."""
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    size = torch.tensor([len(content)])
    dist.broadcast(size, group=group, group_src=0)
    if dist.get_rank(group):
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=0)
    return content.numpy().tobytes().decode()


def _said(error: Exception, group: dist.ProcessGroup | None) -> str:
    return reason(error) if group is None else _ranked(error, dist.get_rank(group))


def _ranked(error: BaseException, rank: int) -> str:
    # An error of the system, such as "no space left on device", names no location, so the rank is added.
    return reason(error) if isinstance(error, CheckpointError) else f"rank {rank}: {reason(error)}"


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # all exceptions, because the other ranks wait for the result
        return None, error
