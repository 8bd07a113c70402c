"""Calls of MLflow's client by the tracker, over a stand-in of the client."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import PluginError
from d9d_core.metric import Table
from d9d_core.tracker import RunInfo
from d9d_mlflow import tracker as module
from d9d_mlflow.config import MlflowConfig
from d9d_mlflow.tracker import MlflowRun, MlflowTracker, _folder, _name
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import REQUEST_LIMIT_EXCEEDED, RESOURCE_DOES_NOT_EXIST

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Client:
    """Stand-in of the client of a store with one experiment at most."""

    def __init__(self, experiment: str | None = None, run: str | None = "active", points: Any = ()) -> None:
        self.experiment, self.run, self.points = experiment, run, dict(points)
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.uri: str | None = None

    def __call__(self, tracking_uri: str) -> Client:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, _name: str) -> Any:
        if self.failure is not None:
            raise self.failure
        return self.experiment and SimpleNamespace(lifecycle_stage=self.experiment, experiment_id="old")

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.calls.append(("experiment", name, artifact_location))
        return "new"

    def create_run(self, experiment: str, run_name: str, tags: Any) -> Any:
        self.calls.append(("run", experiment, run_name, tags))
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def get_run(self, run_id: str) -> Any:
        if self.failure is not None:
            raise self.failure
        info = SimpleNamespace(lifecycle_stage=self.run)
        return SimpleNamespace(info=info, data=SimpleNamespace(metrics=list(self.points)))

    def get_metric_history(self, _run: str, name: str) -> list[Any]:
        return [SimpleNamespace(step=step, timestamp=at) for step, at in self.points[name]]

    def log_batch(self, run: str, params: Any = (), metrics: Any = ()) -> None:
        points = [(m.key, m.value, m.timestamp, m.step) for m in metrics]
        self.calls.append(("batch", run, [(p.key, p.value) for p in params] or points))

    def log_text(self, run: str, text: str, file: str) -> None:
        self.calls.append(("text", run, text, file))

    def log_artifact(self, run: str, path: str, folder: str) -> None:
        content = Path(path).read_bytes() if Path(path).exists() else b""
        self.calls.append(("artifact", run, Path(path).name, folder, content[:4]))

    def update_run(self, run: str, status: str) -> None:
        self.calls.append(("update", run, status))

    def set_terminated(self, run: str, status: str) -> None:
        self.calls.append(("end", run, status))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Opens the tracker with a stand-in of the client."""

    def run(client: Client, config: MlflowConfig, state: Any = None, resumed: int = 0, **facts: Any) -> Any:
        monkeypatch.setattr(module, "MlflowClient", client)
        monkeypatch.setattr(module, "_make_store", lambda path: client.calls.append(("store", path)))
        info = RunInfo("mine", tmp_path / "runs" / "mine", "of a test", {"steps": 10}, 10, resumed, **facts)
        return MlflowTracker(config).open(info, state)

    return run


def test_a_new_run_has_an_experiment_tags_and_parameters(opened: Any, tmp_path: Path) -> None:
    client = Client()
    opened(client, MlflowConfig(experiment="e"), hparams={"lr": 0.1}, tags=("a",))
    directory = tmp_path / "runs" / "mine"
    assert directory.is_dir()
    assert client.uri == f"sqlite:///{directory / 'mlflow.db'}"
    assert client.calls == [
        ("store", directory / "mlflow.db"),
        ("experiment", "e", (directory / "mlflow-artifacts").as_uri()),
        ("run", "new", "mine", {"mlflow.note.content": "of a test", "a": "true"}),
        ("batch", "r", [("lr", "0.1"), ("job/steps", "10")]),
    ]


def test_a_server_keeps_its_experiment_and_places_artifacts_itself(opened: Any, tmp_path: Path) -> None:
    there, missing = Client("active"), Client()
    for client in (there, missing):
        opened(client, MlflowConfig(tracking_uri="http://host"))
        assert client.uri == "http://host"
    assert [call[:2] for call in there.calls] == [("run", "old"), ("batch", "r")]
    assert missing.calls[0] == ("experiment", "d9d", None)
    assert not (tmp_path / "runs").exists()


def test_a_store_that_fails_or_lacks_its_experiment_is_named(opened: Any) -> None:
    with pytest.raises(PluginError, match="the MLflow experiment 'd9d' is deleted"):
        opened(Client("deleted"), MlflowConfig(tracking_uri="u"))
    for failure, said in ((RuntimeError("no route\nmore"), "no route"), (RuntimeError(), "RuntimeError")):
        client = Client()
        client.failure = failure
        with pytest.raises(PluginError, match=f"the MLflow store u does not work: {said}; set tracking_uri"):
            opened(client, MlflowConfig(tracking_uri="u"))


def test_a_resumed_run_writes_only_later_steps_and_no_earlier_times(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(points={"loss": [(2, 7000), (5, 9000)], "lr": [(3, 8000)]})
    run = opened(client, MlflowConfig(tracking_uri="u"), {"run_id": "old"}, 4)
    assert client.calls == [("update", "old", "RUNNING")]
    monkeypatch.setattr(module.time, "time", lambda: 8.5)
    run.write(5, {"loss": 1.0, "lr": 0.5})
    monkeypatch.setattr(module.time, "time", lambda: 9.5)
    run.write(6, {"loss": 2.0, "new": 3.0})
    run.write(6, {"loss": 4.0})
    assert client.calls[1:] == [
        ("batch", "old", [("lr", 0.5, 9000, 5)]),
        ("batch", "old", [("loss", 2.0, 9500, 6), ("new", 3.0, 9500, 6)]),
    ]


def test_without_a_state_or_progress_a_new_run_begins(opened: Any) -> None:
    for state, resumed in ((None, 3), ({"run_id": "old"}, 0)):
        client = Client("active")
        assert opened(client, MlflowConfig(tracking_uri="u"), state, resumed).state() == {"run_id": "r"}


def test_a_run_that_is_gone_is_an_error_or_replaced(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gone, deleted = Client("active"), Client("active", run="deleted")
    gone.failure = MlflowException("gone", error_code=RESOURCE_DOES_NOT_EXIST)
    gone.get_experiment_by_name = Client("active").get_experiment_by_name  # type: ignore[method-assign]
    for client in (gone, deleted):
        with pytest.raises(PluginError, match="MLflow no longer has the run 'old' of this job; restore it"):
            opened(client, MlflowConfig(tracking_uri="u"), {"run_id": "old"}, 3)
    run = opened(deleted, MlflowConfig(tracking_uri="u", lost_run="new"), {"run_id": "old"}, 3)
    assert run.state() == {"run_id": "r"}
    assert "a new run replaces it" in capsys.readouterr().err


def test_calls_have_at_most_1000_metrics_and_100_parameters() -> None:
    client = Client()
    run = MlflowRun(client, "r", {})  # type: ignore[arg-type]
    run.write(1, {f"m{number}": 0.0 for number in range(1001)})
    run.write_parameters({f"p{number}": number for number in range(101)})
    sizes = [len(found) if isinstance(found, list) else found for _, _, found in client.calls]
    assert sizes == [1000, 1, 100, 1]


def test_a_parameter_has_at_most_6000_characters() -> None:
    client = Client()
    run = MlflowRun(client, "r", {})  # type: ignore[arg-type]
    run.write_parameters({"long": "x" * 6001, "list": [1, 2], "a": {"b:c": None}})
    assert client.calls == [("batch", "r", [("long", "x" * 6000), ("list", "[1, 2]"), ("a/b_x3a_c", "null")])]


def test_without_earlier_points_the_clock_alone_gives_the_times(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 0.0)
    for state, resumed in ((None, 0), ({"run_id": "r"}, 3)):
        client = Client("active")
        opened(client, MlflowConfig(tracking_uri="u"), state, resumed).write(4, {"loss": 1.0})
        assert client.calls[-1] == ("batch", "r", [("loss", 1.0, 0, 4)])


def test_another_failure_of_the_server_is_not_taken_for_a_lost_run(opened: Any) -> None:
    client = Client("active")
    client.failure = MlflowException("too many requests", error_code=REQUEST_LIMIT_EXCEEDED)
    with pytest.raises(PluginError, match="the MLflow store u does not work: .*too many requests"):
        opened(client, MlflowConfig(tracking_uri="u", lost_run="new"), {"run_id": "old"}, 3)


def test_a_store_gets_its_name_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []
    disposed: list[bool] = []

    def made(uri: str, artifacts: str) -> Any:
        path = Path(uri.removeprefix("sqlite:///"))
        begun.append(path)
        assert not artifacts.startswith("sqlite")
        assert list(tmp_path.iterdir()) == [tmp_path / "other"]
        path.write_text("tables")
        return SimpleNamespace(engine=SimpleNamespace(dispose=lambda: disposed.append(path.exists())))

    library = SimpleNamespace(SqlAlchemyStore=made)
    monkeypatch.setitem(sys.modules, "mlflow.store.tracking.sqlalchemy_store", library)
    (tmp_path / "other").write_text("")
    (tmp_path / ".mlflow.db.begun-00000000").write_text("of a process that died")
    for _ in range(2):  # the second time it is there
        module._make_store(tmp_path / "mlflow.db")
    assert len(begun) == 1
    assert re.fullmatch(r"\.mlflow\.db\.begun-[0-9a-f]{8}", begun[0].name)
    assert disposed == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db", "other"]
    assert (tmp_path / "mlflow.db").read_text() == "tables"


def test_texts_tables_and_files_are_artifacts_by_series_and_step(tmp_path: Path) -> None:
    client = Client()
    run = MlflowRun(client, "r", {})  # type: ignore[arg-type]
    run.write_texts(3, {"a/7.txt": "text"})
    table = Table(torch.tensor([[1.0, math.nan]]), row="layer", column="expert", unit="load")
    run.write_tables(3, {"load": table})
    (tmp_path / "job.yaml").write_text("steps: 3")
    run.write_files(3, {"job": tmp_path / "job.yaml"})
    run.write_pictures(3, {"p": torch.zeros(2, 2, 3, dtype=torch.uint8)})
    content = {"columns": ["layer", "expert 0", "expert 1"], "data": [["0", 1.0, None]]}
    assert client.calls == [
        ("text", "r", "text", "texts/a/7_x2e_txt/3.txt"),
        ("text", "r", json.dumps(content), "tables/load/3.json"),
        ("artifact", "r", "job.yaml", "files/job/3", b"step"),
        ("artifact", "r", "3.png", "pictures/p", b"\x89PNG"),
    ]


@pytest.mark.parametrize(("status", "stored"), [("finished", "FINISHED"), ("stopped", "KILLED"), ("failed", "FAILED")])
def test_a_run_ends_once_and_takes_nothing_more(status: Any, stored: str) -> None:
    client = Client()
    run = MlflowRun(client, "r", {})  # type: ignore[arg-type]
    run.flush()
    run.close(status)
    run.close("failed")
    assert client.calls == [("end", "r", stored)]
    calls: list[Callable[[], None]] = [
        run.flush, lambda: run.write(1, {}), lambda: run.write_texts(1, {}), lambda: run.write_tables(1, {}),
        lambda: run.write_files(1, {}), lambda: run.write_pictures(1, {}),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="the run is closed"):
            call()


def test_names_have_allowed_characters_and_stay_different() -> None:
    assert _name("a:b") == "a_x3a_b"
    assert _name("a_x3a_b") == "a_x5f_x3a_b"
    assert _name("a_b-c. d/e") == "a_b-c. d/e"
    long = [_name("n" * 300 + letter) for letter in "ab"]
    assert long[0] != long[1]
    assert all(len(name) <= 250 and "~" not in name for name in long)
    assert [_folder(name) for name in ("7.txt", "x7.txt", "7.txt/a", "7.gif", "a/12.json")] == [
        "7_x2e_txt", "x7.txt", "7_x2e_txt/a", "7.gif", "a/12_x2e_json",
    ]  # fmt: skip
