"""Check of what a dataset gives against what a task reads."""

from __future__ import annotations

from d9d_core.extend import JobError, Microbatch


def check_fields(microbatch: Microbatch, task: str, *names: str) -> None:
    """Check that a microbatch has the tensors that a task reads.

    Args:
        microbatch: of the dataset.
        task: name of the task, for messages.
        names: of the tensors.

    Raises:
        JobError: it lacks one.
    """
    if missing := [name for name in names if name not in microbatch]:
        raise JobError(
            f"data: task '{task}' reads {', '.join(missing)}, and the dataset gives {', '.join(sorted(microbatch))}; "
            "use a dataset for this task, or another task"
        )
