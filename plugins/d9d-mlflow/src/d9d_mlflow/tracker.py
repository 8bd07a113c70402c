"""Tracker that writes to MLflow."""

from __future__ import annotations

import json
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from d9d_core.errors import PluginError
from d9d_core.metric import Table
from d9d_core.tensors import encode_png
from d9d_core.tracker import Picture, RunInfo, flatten, shortened, storable
from d9d_core.types import Json, State
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.tracking import MlflowClient

from d9d_mlflow.config import MlflowConfig

#: Limits of MLflow's API: metrics per call, parameters per call, and characters of a parameter value.
_METRICS, _PARAMS, _LENGTH = 1000, 100, 6000
_NAME = 250  # largest number of bytes of a name
_STORE = "mlflow.db"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """Tracker ``mlflow``, which opens or resumes a run in an MLflow store."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> MlflowRun:
        """Create a run, or resume the run whose id is in ``state``.

        Raises:
            PluginError: the store cannot be reached or written, or the run no longer exists and ``lost_run`` is
                ``off``.
        """
        uri = self._config.tracking_uri
        try:
            if uri is None:
                run.directory.mkdir(parents=True, exist_ok=True)
                _make_store(run.directory.absolute() / _STORE)
            client = MlflowClient(tracking_uri=uri or f"sqlite:///{run.directory.absolute() / _STORE}")
            found = None
            if run.resumed_step and state is not None:
                found = self._continued(client, str(state["run_id"]))
            return found or self._created(client, run)
        except PluginError:
            raise
        except Exception as error:  # MLflow and its dependencies raise many types
            where = uri or run.directory
            raise PluginError(
                f"the MLflow store {where} does not work: {_first_line(error)}; set tracking_uri of the tracker "
                "'mlflow' to a writable one"
            ) from error

    def _continued(self, client: MlflowClient, run_id: str) -> MlflowRun | None:
        """Open the run with the saved id and the last step of each series; ``None`` to start a new run instead."""
        try:
            known = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            known = None
        if known is None or known.info.lifecycle_stage != "active":
            text = f"MLflow no longer has the run '{run_id}' of this job"
            if self._config.lost_run == "off":
                raise PluginError(
                    f"{text}; restore it with 'mlflow runs restore', or set 'lost_run: new' of the tracker 'mlflow' to "
                    "go on in a new run"
                )
            with suppress(OSError):
                print(f"warning: {text}; a new run replaces it", file=sys.stderr)  # noqa: T201
            return None
        client.update_run(run_id, status="RUNNING")
        # MLflow cannot remove points. So points after the checkpoint stay, and repeated steps do not write them again.
        last, latest = dict[str, int](), 0
        for name in known.data.metrics:
            points = client.get_metric_history(run_id, name)
            last[name] = max(point.step for point in points)
            latest = max(latest, *(point.timestamp for point in points))
        return MlflowRun(client, run_id, last, latest)

    def _created(self, client: MlflowClient, run: RunInfo) -> MlflowRun:
        name = self._config.experiment
        experiment = client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage != "active":
            raise PluginError(
                f"the MLflow experiment '{name}' is deleted; restore it with 'mlflow experiments restore', or name "
                "another one in experiment of the tracker 'mlflow'"
            )
        if experiment is None:
            local = (run.directory.absolute() / "mlflow-artifacts").as_uri()
            place = None if self._config.tracking_uri else local
            experiment_id = client.create_experiment(name, artifact_location=place)
        else:
            experiment_id = experiment.experiment_id
        tags = {"mlflow.note.content": run.description} if run.description else {}
        created = client.create_run(experiment_id, run_name=run.name, tags=tags | dict.fromkeys(run.tags, "true"))
        opened = MlflowRun(client, created.info.run_id, {})
        opened.write_parameters({**run.hparams, "job": run.config})
        return opened


class MlflowRun:
    """Open run of the tracker ``mlflow``.

    Args:
        client: client of the store.
        run_id: id of the run.
        last: last step of each series in the store; this step and earlier ones are not written again.
        latest: time of the latest point, in milliseconds since 1970. Stores sort by time, so no later point gets an
            earlier time, even if the clock was set back.
    """

    def __init__(self, client: MlflowClient, run_id: str, last: Mapping[str, int], latest: int = 0) -> None:
        self._client = client
        self._run_id = run_id
        self._last = dict(last)
        self._latest = latest
        self._open = True

    def write_parameters(self, values: Mapping[str, Json]) -> None:
        """Write parameters, with names such as ``optimizer/lr``."""
        params = [
            Param(_name(storable(name)), (value if isinstance(value, str) else json.dumps(value))[:_LENGTH])
            for name, value in flatten(values).items()
        ]
        for part in _parts(params, _PARAMS):
            self._client.log_batch(self._run_id, params=part)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point for each series whose last step is earlier than this one."""
        self._check()
        self._latest = now = max(self._latest, int(time.time() * 1000))
        new = {_name(name): value for name, value in values.items() if step > self._last.get(_name(name), -1)}
        for part in _parts([Metric(name, value, now, step) for name, value in new.items()], _METRICS):
            self._client.log_batch(self._run_id, metrics=part)
            # Record the steps after each call: if a later call fails, the caller writes the step again.
            self._last |= {metric.key: step for metric in part}

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Store each text as the artifact ``texts/<name>/<step>.txt``."""
        self._check()
        for name, text in texts.items():
            self._client.log_text(self._run_id, text, f"texts/{_folder(name)}/{step}.txt")

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Store each table as the artifact ``tables/<name>/<step>.json``, which MLflow shows as a table."""
        self._check()
        for name, table in tables.items():
            rows, columns = table.values.shape
            names = table.rows or tuple(map(str, range(rows)))
            cells = [[None if value != value else value for value in row] for row in table.values.tolist()]  # noqa: PLR0124
            data = [[label, *row] for label, row in zip(names, cells, strict=True)]
            content = {"columns": [table.row, *(f"{table.column} {index}" for index in range(columns))], "data": data}
            self._client.log_text(self._run_id, json.dumps(content), f"tables/{_folder(name)}/{step}.json")

    def write_pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Store each picture as the artifact ``pictures/<name>/<step>.png``."""
        self._check()
        for name, picture in pictures.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{step}.png"
                path.write_bytes(encode_png(picture))
                self._client.log_artifact(self._run_id, str(path), f"pictures/{_folder(name)}")

    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        """Store each file as an artifact in ``files/<name>/<step>``."""
        self._check()
        for name, path in files.items():
            self._client.log_artifact(self._run_id, str(path), f"files/{_folder(name)}/{step}")

    def flush(self) -> None:
        """Do nothing but check that the run is open: a write has reached the store when it returns."""
        self._check()

    def state(self) -> State:
        """Id of the run, for resuming."""
        return {"run_id": self._run_id}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Store the final status of the run."""
        if self._open:
            self._open = False
            self._client.set_terminated(self._run_id, _STATUS[status])

    def _check(self) -> None:
        if not self._open:
            raise ValueError("the run is closed")


def _name(name: str) -> str:
    """Encode a name for MLflow: each character that it does not allow becomes its code, so ``a:b`` becomes ``a_x3a_b``.

    Different names stay different: ``_x`` itself becomes ``_x5f_x``, and a name that is cut ends in a digest.
    """
    coded = re.sub(r"[^\w\-. /]|_(?=x)", lambda found: f"_x{ord(found[0]):x}_", name)
    return shortened(coded, _NAME).replace("~", "_")


def _folder(name: str) -> str:
    """Artifact folder of a name; a part such as ``7.txt`` is escaped, as it could be the file of another series."""
    return "/".join(re.sub(r"^(\d+)\.(?=(txt|json|png)$)", r"\1_x2e_", part) for part in _name(name).split("/"))


def _make_store(path: Path) -> None:
    """Create the database of a run, under a temporary name until its tables are complete.

    MLflow creates the tables in many steps, and cannot open a database in which some of them are missing.
    """
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    prefix = f".{path.name}.begun-"
    for rest in path.parent.glob(f"{prefix}*"):
        rest.unlink()
    # Each attempt has a new name, because MLflow caches connections by name, even if the file is gone.
    begun = path.with_name(prefix + secrets.token_hex(4))
    store: Any = SqlAlchemyStore(f"sqlite:///{begun}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)  # type: ignore[no-untyped-call]
    store.engine.dispose()
    begun.replace(path)


def _parts(items: Sequence[Any], length: int) -> list[Sequence[Any]]:
    return [items[start : start + length] for start in range(0, len(items), length)]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
