"""What ``d9d verify`` prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from d9d_core.cli.output import console_for

if TYPE_CHECKING:
    from d9d_core.job import Job
    from d9d_core.verify.compare import Verdict


def verify_job(job: Job, layouts: Sequence[str], steps: int, max_ranks: int, as_json: bool) -> bool:
    """Run the comparison and print it; whether every layout passed."""
    from d9d_core.verify.layouts import own_layout, parse_layout
    from d9d_core.verify.run import verify

    chosen = [parse_layout(text, job) for text in layouts] or [own_layout(job, max_ranks)]
    verdicts = verify(job, chosen, steps, _note)
    if as_json:
        sys.stdout.write(json.dumps([verdict.to_json() for verdict in verdicts], indent=1, allow_nan=False) + "\n")
    else:
        _print(verdicts)
    return all(verdict.passed for verdict in verdicts)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - standard output has the result


def _print(verdicts: Sequence[Verdict]) -> None:
    table = Table(box=None)
    for heading in ("layout", "loss", "gradient norm", "worst angle (1-cos)", "worst length", "verdict"):
        table.add_column(heading)
    for verdict in verdicts:
        diverged = "" if verdict.diverged is None else f"step {verdict.diverged[0] + 1}: {verdict.diverged[1]}"
        table.add_row(
            verdict.layout,
            f"{verdict.loss:.1e}",
            f"{verdict.grad_norm:.1e}",
            f"{verdict.angle[0]:.1e} {verdict.angle[1]}",
            f"{verdict.norm[0]:.1e} {verdict.norm[1]}",
            "pass" if verdict.passed else f"FAIL {diverged}",
        )
    console_for().print(table)
