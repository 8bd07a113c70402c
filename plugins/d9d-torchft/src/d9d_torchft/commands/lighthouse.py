"""Command ``d9d torchft lighthouse``."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.errors import JobError

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def lighthouse(
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Numeric address to listen on; the port 0 chooses a free one.")
    ] = "127.0.0.1:29510",
    heartbeat_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time after which a silent replica counts as lost.", min=0.5)
    ] = 2.0,
    join_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest wait for a living replica that has not joined.", min=0.5)
    ] = 300.0,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for torchft's own lines, several in each step.")
    ] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C. The lighthouse has no authentication: keep it in a private network."""
    found = re.fullmatch(r"(\S+):(\d+)", address)
    if found is None:
        raise JobError(f"--address: '{address}' is not HOST:PORT; give an address such as 127.0.0.1:29510")
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        text = f"torchft cannot be imported ({error}); install it: pip install 'torchft==0.2.*'"
        raise JobError(text) from error
    # torchft prints several lines in each step, and has no option against it.
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    kept = os.dup(2)
    os.dup2(target, 2)
    try:
        server = LighthouseServer(
            bind=address,
            min_replicas=1,
            join_timeout_ms=round(1000 * join_timeout),
            quorum_tick_ms=50,
            heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
        )
    except RuntimeError as error:
        os.dup2(kept, 2)
        raise JobError(f"--address: cannot listen on {address} ({error}); choose another address or port") from None
    typer.echo(f"lighthouse: http://{found[1]}:{server.address().rpartition(':')[2]}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    parent = os.getppid()
    while not child or os.getppid() == parent:  # d9d torchft run may have been killed
        time.sleep(1)
