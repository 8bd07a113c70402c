"""Attempts at saves: a storage that fails for a while ends no run."""

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
    """Attempts at the saves of one run, and how many failed in a row; the same on all ranks.

    Args:
        tolerated: failures in a row after which another attempt is made.
        longest_pause: seconds.
        group: all ranks; used by nobody else while a save runs.
        warn: called once for each row of failures, on the first rank, in the thread that saves.
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
        """Try once; ``None`` if that failed and may be tried again. Collective over all ranks.

        Raises:
            SaveError: it failed once too often; the same error on all ranks.
        """
        try:
            report = save()
        except SaveError as error:
            self.failures += 1
            if self.failures > self._tolerated:
                raise self._last(error) from error
            if self.failures == 1:
                self._warn(
                    f"warning: {error}; training goes on, and the save is tried again with growing pauses, until "
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
        """Try until it succeeds. Collective over all ranks.

        Args:
            save: one attempt; fails on all ranks or on none.
            superseded: ends a pause, and stops trying once it is set on any rank: ``None`` is returned then.
            failed: called before each pause.

        Raises:
            SaveError: it failed once too often; the same error on all ranks.
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
