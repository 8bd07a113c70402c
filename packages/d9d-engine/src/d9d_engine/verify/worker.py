"""Process of one layout; started by :mod:`d9d_engine.verify.run`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from d9d_core.errors import D9dError

from d9d_engine.job import Job
from d9d_engine.process_env import ProcessEnv


def main(directory: Path, steps: int) -> None:
    """Measure the job in ``directory`` and leave the result there."""
    from d9d_engine.verify.measure import measure

    job = Job.load(directory / "job.json")
    try:
        with job.joined(ProcessEnv.from_environment(os.environ)) as topology:
            measurement = measure(job, topology, steps)
            if topology.is_main:
                measurement.write(directory)
    except BaseException as error:
        text = str(error) if isinstance(error, D9dError) else f"{type(error).__name__}: {error}"
        with suppress(FileExistsError), (directory / "failure.txt").open("x") as file:
            file.write(text)  # the first failure; others are its echo
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
