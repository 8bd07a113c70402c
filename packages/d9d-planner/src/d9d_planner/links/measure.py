"""Launch of the processes that measure collectives between this machine's devices."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

from d9d_core.errors import TrainingError
from d9d_core.interpreter import python_command

#: Time limit of the processes in seconds.
_PATIENCE = 180.0


def measured_link(device: str, ranks: int) -> dict[str, float]:
    """Measure collectives between this machine's devices; return a device's fields ``link`` and ``link_latency``.

    Takes seconds, mostly to start the processes, and 1 GiB of each accelerator.

    Args:
        device: type of the devices; on ``cpu``, the processes share the CPU.
        ranks: number of devices, with one process each.

    Raises:
        TrainingError: a process failed or reached the time limit.
    """
    with tempfile.TemporaryDirectory(prefix="d9d-links-") as temporary:
        directory = Path(temporary)
        outputs = [(directory / f"output-{rank}.txt").open("w+", errors="replace") for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, output in enumerate(outputs):
                module = [*python_command(), "-m", "d9d_planner.links.worker"]
                arguments = [temporary, device, str(rank), str(ranks)]
                processes.append(
                    subprocess.Popen(  # noqa: S603 - our own interpreter
                        [*module, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                    )
                )
            _wait(processes)
            failed = [rank for rank, process in enumerate(processes) if process.returncode]
            if failed:
                outputs[failed[0]].seek(0)
                said = outputs[failed[0]].read().strip().splitlines() or ["it printed nothing"]
                raise TrainingError(
                    f"--calibrate: collectives between {ranks} devices could not be measured: process {failed[0]}: "
                    f"{said[-1]}; if this cannot be fixed, set 'link' in a file for --gpu"
                )
            found: dict[str, float] = json.loads((directory / "rates.json").read_text())
            return found
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for output in outputs:
                output.close()


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended, or one has failed.

    Raises:
        TrainingError: the processes reached the time limit.
    """
    end = time.monotonic() + _PATIENCE
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        if time.monotonic() > end:
            raise TrainingError(
                f"--calibrate: {len(processes)} processes did not measure their collectives within {_PATIENCE:.0f} s; "
                "check whether collectives work on this machine, or set 'link' in a file for --gpu"
            )
        time.sleep(0.05)
