"""Channel between a launcher and the processes it started: files in a directory. Imports no torch.

The agent between them has its own way with signals: it passes them on and kills what is still there half a minute
later, although a rank may be saving a checkpoint. So processes write down who they are, and the launcher asks them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Names the directory in the environment of started processes.
VARIABLE = "D9D_LAUNCH_DIR"


@dataclass(frozen=True, slots=True)
class Channel:
    """Channel in a directory that exists as long as the launcher.

    Attributes:
        directory: exists.
    """

    directory: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Channel | None:
        """Channel of the launcher, in a process that ``d9d train`` started."""
        return cls(Path(environ[VARIABLE])) if VARIABLE in environ else None

    @property
    def stopping(self) -> bool:
        """Whether the user asked the processes to stop."""
        return (self.directory / "stop").exists()

    def enter(self, local_rank: int) -> None:
        """Enter the channel, in a started process, which can be reached from now on."""
        (self.directory / f"{local_rank}.pid").write_text(str(os.getpid()))

    def stop(self, number: signal.Signals, processes: int) -> bool:
        """Ask all processes to stop; called in the launcher.

        Args:
            number: which signal they get.
            processes: how many were started.

        Returns:
            Whether all of them could be asked; else some are not that far yet.
        """
        (self.directory / "stop").touch()
        files = list(self.directory.glob("*.pid"))
        for file in files:
            # One may have ended, or be about to write its number.
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), number)
        return len(files) == processes
