"""One process of the comparison with torch's own parallelism: measures contenders, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layout_worker import job_of, measured
from rank_steps import answer_all, begin, measured_steps
from rows import Row
from torch import distributed as dist
from torch_peers import Peer, step_of

#: Seconds to measure.
WINDOW = 3.0


def main(asked: str, answered: str, launched: str) -> None:
    """Append the answer of each contender to a file, on the first rank."""
    device = begin()

    def measure(question: Mapping[str, Any], answer: dict[str, Any]) -> None:
        if "row" in question:
            row = Row.from_json(question["row"])
            answer |= measured(row, job_of(row, device), device, float(launched), WINDOW)
        else:
            peer = Peer(**question["peer"])
            tokens = peer.tokens / dist.get_world_size()
            answer |= measured_steps(step_of(peer, device), tokens, device, float(launched), WINDOW)

    answer_all(Path(asked), Path(answered), device, measure, _said)


def _said(answer: Mapping[str, Any]) -> str:
    return (
        f"{answer['name']}: {answer['tokens_per_second']:,.0f} tokens/s of a GPU, {1e3 * answer['seconds']:.1f} ms, "
        f"{answer.get('peak_gib', 0):.1f} GiB, communication {answer.get('communication_ms', 0):.1f}, exposed "
        f"{answer.get('exposed_ms', 0):.1f}, loss {answer['losses'][0]:.3f}; took {answer['whole_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
