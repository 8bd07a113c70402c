"""Names of checkpoints in a directory."""

from __future__ import annotations

import re

from d9d_weights.files.directory import DirectoryStore, is_set_aside

_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}([0-9]{{8,18}})")


def folder(step: int) -> str:
    """Name of the checkpoint of a step, such as ``step-00000100``."""
    return f"{_PREFIX}{step:08d}"


def step_of(name: str) -> int | None:
    """Step of the checkpoint with this name; ``None`` if the name is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and folder(step) == name else None


def steps_in(storage: DirectoryStore) -> list[int]:
    """Steps of the existing checkpoints, newest first; the checkpoints are not verified."""
    return sorted((step for name in storage.names() if (step := step_of(name)) is not None), reverse=True)


def strays_in(storage: DirectoryStore) -> list[str]:
    """Names that start like the names of checkpoints, but belong neither to a checkpoint nor to a set-aside one."""
    return sorted(
        name
        for name in storage.names()
        if name.startswith(_PREFIX) and step_of(name) is None and not is_set_aside(name)
    )
