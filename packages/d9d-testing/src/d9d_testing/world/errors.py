"""Errors of a world: assertion errors, because they are results of a test."""

from __future__ import annotations

from collections.abc import Mapping


class WorldError(AssertionError):
    """Error of a world in which some ranks did not return.

    Attributes:
        reports: rank -> traceback of its exception, its stack, or the reason of its end.
    """

    def __init__(self, headline: str, reports: Mapping[int, str]) -> None:
        self.reports = dict(reports)
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(self.reports.items()):
            by_text.setdefault(text, []).append(rank)
        parts = [f"--- {_ranks(ranks)} ---\n{text.rstrip()}" for text, ranks in by_text.items()]
        super().__init__("\n\n".join([headline, *parts]))


class RankFailedError(WorldError):
    """Ranks of a world raised exceptions, or their processes died. The other ranks were stopped."""


class RankHungError(WorldError):
    """Ranks were still running at the time limit; the reports are their stacks. All ranks were stopped."""


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
