"""Values that the tracker writes are read back through MLflow's client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from d9d_core.errors import PluginError
from d9d_core.tracker import RunInfo
from d9d_mlflow.config import MlflowConfig
from d9d_mlflow.tracker import MlflowTracker
from d9d_testing.suites.tracker import Logged, TrackerSuite, by_step
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def client(directory: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")


def newest(directory: Path, experiment: str = "d9d") -> Run:
    store = client(directory)
    found = store.get_experiment_by_name(experiment)
    assert found is not None
    run: Run = store.search_runs([found.experiment_id], order_by=["attributes.start_time DESC"])[0]
    return run


def artifacts(directory: Path, kind: str) -> list[Path]:
    folder = Path(newest(directory).info.artifact_uri.removeprefix("file://")) / kind
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def info(directory: Path, resumed_step: int = 0, **facts: Any) -> RunInfo:
    return RunInfo("mine", directory, "of a test", {"steps": 10, "data": {"name": "x"}}, 10, resumed_step, **facts)


@pytest.fixture(autouse=True)
def prepared(tmp_path: Path, empty: Path) -> None:
    """A store in the directory of the run: making its tables takes seconds."""
    shutil.copyfile(empty / "mlflow.db", tmp_path / "mlflow.db")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlflow")
    client(folder)
    return folder


class TestMlflow(TrackerSuite):
    pytestmark = pytest.mark.full

    target = "mlflow"
    patience: ClassVar = 10.0
    rewinds: ClassVar = False

    def logged(self, directory: Path) -> Logged:
        run, store = newest(directory), client(directory)
        histories = {name: store.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        return by_step((point.step, name, point.value) for name, points in histories.items() for point in points)

    def logged_tables(self, directory: Path) -> Mapping[int, Sequence[str]]:
        return self.logged_kind(directory, "tables")

    def logged_kind(self, directory: Path, kind: str) -> Mapping[int, Sequence[str]]:
        found: dict[int, list[str]] = {}
        for path in artifacts(directory, kind):
            name = str(path.parent).split(f"/artifacts/{kind}/")[1]
            found.setdefault(int(path.stem), []).append(name)
        return found

    def logged_contents(self, directory: Path, kind: str) -> Mapping[int, Mapping[str, Any]] | None:
        if kind not in ("tables", "texts"):
            return None
        found: dict[int, dict[str, Any]] = {}
        for path in artifacts(directory, kind):
            text = path.read_bytes().decode()
            content = json.loads(text)["data"] if kind == "tables" else text
            found.setdefault(int(path.stem), {})[str(path.parent).split(f"/artifacts/{kind}/")[1]] = content
        return found

    def logged_file(self, directory: Path, name: str) -> bytes:
        (path,) = artifacts(directory, f"files/{name}")
        return path.read_bytes()


@pytest.mark.full
def test_a_run_has_its_parameters_once_and_a_state(tmp_path: Path) -> None:
    tracker = MlflowTracker(MlflowConfig(experiment="other"))
    facts: dict[str, Any] = {"hparams": {"optimizer": {"lr": 0.1}, "long": "x" * 9000}, "tags": ("sweep",)}
    run = tracker.open(info(tmp_path, **facts), None)
    assert newest(tmp_path, "other").info.status == "RUNNING"
    run.write(1, {"train@loss": 1.0})
    run.close("stopped")
    assert newest(tmp_path, "other").info.status == "KILLED"
    tracker.open(info(tmp_path, 1, hparams={"optimizer": {"lr": 9}}), run.state()).close("failed")
    found = newest(tmp_path, "other")
    assert (found.info.status, found.info.run_name) == ("FAILED", "mine")
    params = found.data.params
    assert (params["optimizer/lr"], params["job/data/name"], len(params["long"])) == ("0.1", "x", 6000)
    assert (found.data.tags["mlflow.note.content"], found.data.tags["sweep"]) == ("of a test", "true")
    assert found.data.metrics == {"train_x40_loss": 1.0}


@pytest.mark.full
def test_names_that_differ_stay_apart(tmp_path: Path) -> None:
    names = ["a:b", "a-b", "a_x3a_b", "a_b", "a@b", "_x5:", "\x05x3a_"]
    run = MlflowTracker(MlflowConfig()).open(info(tmp_path, hparams=dict.fromkeys(names, 1)), None)
    run.write(1, {name: float(number) for number, name in enumerate(names)})
    run.close("finished")
    found = newest(tmp_path).data
    assert sorted(found.metrics.values()) == [float(number) for number in range(len(names))]
    assert len([name for name in found.params if not name.startswith("job/")]) == len(names)
    assert found.metrics["a_x3a_b"] == 0.0


@pytest.mark.thorough
def test_a_run_that_is_gone_is_said_or_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MlflowTracker(MlflowConfig()).open(info(tmp_path), None)
    run.close("stopped")
    gone = run.state()["run_id"]
    client(tmp_path).delete_run(gone)
    for lost in (run.state(), {"run_id": "0" * 32}):
        with pytest.raises(
            PluginError, match="MLflow no longer has the run .* restore it with 'mlflow runs restore', or set 'lost_run"
        ):
            MlflowTracker(MlflowConfig()).open(info(tmp_path, 1), lost)
    new = MlflowTracker(MlflowConfig(lost_run="new")).open(info(tmp_path, 1), run.state())
    new.close("finished")
    assert new.state()["run_id"] != gone
    assert "a new run replaces it" in capsys.readouterr().err


@pytest.mark.full
def test_a_store_whose_making_was_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    path = tmp_path / "mlflow.db"
    path.unlink()
    monkeypatch.setattr("alembic.command.upgrade", kill)  # the first tables are there, their later columns are not
    with pytest.raises(Killed):
        MlflowTracker(MlflowConfig()).open(info(tmp_path), None)
    monkeypatch.undo()
    assert not path.exists()
    (begun,) = tmp_path.glob(".mlflow.db.begun-*")
    begun.with_name(f"{begun.name}-journal").write_text("of a transaction that was not finished")
    run = MlflowTracker(MlflowConfig()).open(info(tmp_path), None)
    run.write(1, {"loss": 1.0})
    run.close("finished")
    assert newest(tmp_path).data.metrics == {"loss": 1.0}
    assert not list(tmp_path.glob(".mlflow.db*"))


def test_a_damaged_store_that_was_there_before_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_bytes(b"no database at all")
    with pytest.raises(PluginError, match="does not work"):
        MlflowTracker(MlflowConfig()).open(info(tmp_path), None)
    assert path.read_bytes() == b"no database at all"


@pytest.mark.full
def test_points_stay_in_the_order_of_steps_when_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: Any = None
    for step, now in enumerate([2e9, 1e9, 1.5e9, 1e9]):
        monkeypatch.setattr("time.time", lambda now=now: now)
        run = MlflowTracker(MlflowConfig()).open(info(tmp_path, step), state)
        run.write(step + 1, {"loss": 1.0})
        state = run.state()
    history = client(tmp_path).get_metric_history(state["run_id"], "loss")
    assert [point.step for point in history] == [1, 2, 3, 4]


@pytest.mark.full
def test_a_name_like_a_file_of_another_series_costs_neither(tmp_path: Path) -> None:
    run = MlflowTracker(MlflowConfig()).open(info(tmp_path), None)
    for step in (1, 2):
        run.write_texts(step, {"said/2.txt": "first", "said": "second"})
    run.close("finished")
    found = [str(path).split("/texts/")[1] for path in artifacts(tmp_path, "texts")]
    assert sorted(found) == ["said/1.txt", "said/2.txt", "said/2_x2e_txt/1.txt", "said/2_x2e_txt/2.txt"]


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PluginError, match="the MLflow store .*file does not work: .*; set tracking_uri of the tracker"):
        MlflowTracker(MlflowConfig()).open(info(tmp_path / "file"), None)


@pytest.mark.full
def test_tables_can_be_shown(tmp_path: Path) -> None:
    import torch
    from d9d_core.metric import Table

    run = MlflowTracker(MlflowConfig()).open(info(tmp_path), None)
    run.write_tables(2, {"load": Table(torch.tensor([[1.0, float("nan")]]), row="layer", column="expert", rows=("4",))})
    run.close("finished")
    (path,) = artifacts(tmp_path, "tables")
    assert json.loads(path.read_text()) == {"columns": ["layer", "expert 0", "expert 1"], "data": [["4", 1.0, None]]}
