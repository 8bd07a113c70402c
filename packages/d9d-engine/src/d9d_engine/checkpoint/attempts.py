"""Repeated attempts at saves, so that a temporary failure of the storage does not end the run."""

from __future__ import annotations

import threading
from collections.abc import Callable

from d9d_core.errors import SaveError
from d9d_core.events import SaveReport
from d9d_weights.sharding.collectives import all_gather_objects
from torch import distributed as dist

#: Seconds before the second attempt; each further pause is twice as long.
FIRST_PAUSE = 1.0


class Attempts:
    """Repeats failed saves of one run and counts the failures in a row; the count is the same on all ranks.

    Args:
        tolerated: largest number of failures in a row after which another attempt is still made.
        longest_pause: longest pause between attempts, in seconds.
        group: process group of all ranks; must not be used elsewhere while a save runs.
        warn: called with a text at the first of several failures in a row, on every rank, in the saving thread.
    """

    def __init__(
        self, tolerated: int, longest_pause: float, group: dist.ProcessGroup | None, warn: Callable[[str], None]
    ) -> None:
        self.failures = 0
        self._tolerated = tolerated
        self._longest_pause = longest_pause
        self._group = group
        self._warn = warn

    def once(self, save: Callable[[], SaveReport]) -> SaveReport | None:
        """Make one attempt; return ``None`` if it failed and another one is allowed. Collective over all ranks.

        Raises:
            SaveError: more attempts in a row have failed than are tolerated; the same error on all ranks.
        """
        try:
            report = save()
        except SaveError as error:
            self.failures += 1
            if self.failures > self._tolerated:
                raise self._last(error) from error
            if self.failures == 1:
                self._warn(
                    f"warning: {error}; training continues; the save is repeated with growing pauses until "
                    f"{self._tolerated + 1} attempts in a row have failed (checkpoint.tolerate_failures)"
                )
            return None
        self.failures = 0
        return report

    def run(
        self,
        save: Callable[[], SaveReport],
        superseded: threading.Event,
        failed: Callable[[], None] = lambda: None,
    ) -> SaveReport | None:
        """Repeat a save until it succeeds. Collective over all ranks.

        Args:
            save: makes one attempt; fails on all ranks or on none.
            superseded: event that ends a pause; once it is set on any rank, no further attempt is made and ``None`` is
                returned.
            failed: called before each pause.

        Raises:
            SaveError: more attempts in a row have failed than are tolerated; the same error on all ranks.
        """
        while (report := self.once(save)) is None:
            failed()
            superseded.wait(min(FIRST_PAUSE * 2.0 ** min(self.failures - 1, 30), self._longest_pause))
            if any(all_gather_objects(superseded.is_set(), self._group)):
                return None
        return report

    def _last(self, error: SaveError) -> SaveError:
        if not self._tolerated:
            return error
        return SaveError(f"{error}; {self.failures} attempts in a row have failed (checkpoint.tolerate_failures)")
