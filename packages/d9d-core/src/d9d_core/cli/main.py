"""Entry point of ``d9d``. Ctrl-C prints one line and ends the process, even before the command line is imported."""

from __future__ import annotations

import signal
import sys

from d9d_core.cli.ending import end_in_time
from d9d_core.cli.streams import surviving_streams
from d9d_core.terminal.tracebacks import make_tracebacks_visible

#: Exit status after Ctrl-C, as shells report it.
INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line; see :func:`d9d_core.cli.app.run`."""
    status = 1
    make_tracebacks_visible()
    try:
        with surviving_streams():
            _main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        end_in_time(status)


def _main() -> None:
    try:
        try:
            from d9d_core.cli.interrupts import interrupts_deferred

            with interrupts_deferred():
                from d9d_core.cli.app import run

            run()
        except (KeyboardInterrupt, Exception) as error:  # raised outside of a command; a command prints more itself
            from d9d_core.errors import interrupt_behind

            if isinstance(error, Exception) and not interrupt_behind(error):
                raise
            print("interrupted", file=sys.stderr, flush=True)  # noqa: T201 - for the user
            sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED and hasattr(signal, "pthread_sigmask"):
            # Python re-raises the signal at exit if it arrived while exec() ran text (each dataclass does), although it
            # was handled. Blocking the signal avoids this, and ignores further Ctrl-C.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        raise
