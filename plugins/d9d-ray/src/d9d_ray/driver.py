"""Driver of Ray Train: ``python -m d9d_ray.driver ORDER``, which ``d9d launch submit --engine ray`` starts."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from d9d_core.errors import D9dError
from d9d_core.launcher import EXIT_FAILED, EXIT_STOPPED

from d9d_ray.causes import all_causes, fails_for_good
from d9d_ray.order import END, STOP, TRAINS, Order, write_values

#: Bytes of Ray's object store of a new cluster; the training stores no objects.
_STORE = 100 * 2**20
#: Environment variables for Ray, which a user may override: print the workers' lines without colours, with repeated
#: lines, and without Ray's own copy; use version 2 of Ray Train.
_SETTINGS = {
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}


class CancelledError(Exception):
    """A request to stop arrived while no worker trained, so there is nothing to save or to wait for."""


def main(arguments: list[str], environ: MutableMapping[str, str] = os.environ) -> int:
    """Run the driver; return the exit status, which is also written into the folder of the submission."""
    try:
        order = Order.read(arguments[0])
    except D9dError as error:
        _say(f"error: {error}")
        return EXIT_FAILED
    folder = Path(order.folder)
    stop = _stop_by_sigterm(folder)
    for name, value in {**_SETTINGS, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(order.startup)}.items():
        environ.setdefault(name, value)
    status, cause, reported = _run(order, environ, stop)
    write_values(folder / END, {"status": status, "cause": cause, "reported": reported})
    _say(f"d9d-ray: status {status}" + (f": {cause}" if cause else ""))
    return status


def _run(order: Order, environ: Mapping[str, str], stop: Callable[[], None]) -> tuple[int, str, int | None]:
    """Train; return the exit status, the cause of a failure, and the step of the last report to Ray."""
    folder, end = Path(order.folder), ExitStack()
    try:
        import ray
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        from d9d_ray.worker import train_rank

        ray.init(**cluster_of(order, environ))
        end.callback(ray.shutdown)
        stop()  # again, because ray.init replaces signal handlers
        trainer = DataParallelTrainer(
            train_rank,
            train_loop_config=dict(order.values()),
            scaling_config=ScalingConfig(
                num_workers=order.processes, resources_per_worker=order.resources, use_gpu="GPU" in order.resources
            ),
            run_config=RunConfig(
                # A new name for each submission: d9d continues from its own checkpoints, not from Ray's records.
                name=f"{order.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}",
                storage_path=str(folder / "ray"),
                checkpoint_config=CheckpointConfig(num_to_keep=1),  # Ray's checkpoints only name d9d's checkpoints
                failure_config=FailureConfig(max_failures=order.restarts),
            ),
        )
        result = trainer.fit()
    except CancelledError as error:
        return EXIT_STOPPED, str(error), None
    except ImportError as error:
        return EXIT_FAILED, f"Ray Train cannot be imported: {error}; pip install 'ray[train]>=2.60'", None
    except Exception as error:
        return EXIT_FAILED if fails_for_good(folder) else 1, _cause(folder, str(error)), None
    finally:
        with suppress(Exception):  # the result is known, so errors of the shutdown do not matter
            end.close()
    status, reported = result.return_value, (result.metrics or {}).get("step")
    if type(status) is not int:
        return 1, _cause(folder, "the training function returned no status"), reported
    return status, _cause(folder, "") if status == EXIT_FAILED else "", reported


def cluster_of(order: Order, environ: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of ``ray.init``.

    Args:
        order: order of the run.
        environ: environment variables of the driver.

    Returns:
        Arguments; variables of ``export`` that are not set are left out.
    """
    address = order.address or environ.get("RAY_ADDRESS") or "local"
    if address.startswith(("http://", "https://")):
        address = "auto"  # the driver runs on the cluster, where the job server started it
    exported = {name: environ[name] for name in order.export if name in environ}
    arguments: dict[str, Any] = {"address": address, "runtime_env": {"env_vars": exported}}
    if address == "local":
        needed = math.ceil(order.processes * order.resources["CPU"])
        arguments |= {
            "num_cpus": max(needed, os.cpu_count() or 1),
            "object_store_memory": _STORE,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",  # other machines need no access to a cluster on this one
        }
    return arguments


def _stop_by_sigterm(folder: Path) -> Callable[[], None]:
    """Return a function that makes SIGTERM write the request to stop, for which workers look, and call it once.

    If no worker trains, such as while Ray waits for machines, the handler raises :class:`CancelledError`.
    """

    def request(*_: object) -> None:
        again = (folder / STOP).exists()
        with suppress(OSError):
            (folder / STOP).touch()
        if not again and not (folder / TRAINS).exists():
            raise CancelledError("cancelled while no worker trained; the newest checkpoint is as it was")

    def handle() -> None:
        signal.signal(signal.SIGTERM, request)

    handle()
    return handle


def _cause(folder: Path, otherwise: str) -> str:
    causes = all_causes(folder)
    return causes[0][0] if causes else otherwise


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the driver's log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
