"""Fields in which the jobs of runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: Fields that are not compared, because they usually differ between any two runs.
NAMES = ("run.name", "run.dir", "run.description")


def flattened(job: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a job to dotted field names; lists stay values."""
    found: dict[str, Any] = {}
    for name, value in job.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def differing(jobs: Sequence[Mapping[str, Any]], leave_out: Sequence[str] = NAMES) -> dict[str, list[Any]]:
    """Fields that are not equal in all jobs, with the value of each job; ``None`` where a job lacks the field."""
    flat = [flattened(job) for job in jobs]
    names = dict.fromkeys(name for fields in flat for name in fields if name not in leave_out)
    table = {name: [fields.get(name) for fields in flat] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def shown(value: Any) -> str:
    """Format a field's value as in a job file."""
    return value if isinstance(value, str) else json.dumps(value)
