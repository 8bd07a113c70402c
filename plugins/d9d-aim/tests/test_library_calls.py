"""Repository and run of the tracker, over stand-ins of the library, which has no wheels for some platforms."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_aim.config import AimConfig
from d9d_core.errors import PluginError
from d9d_core.tracker import Histogram, RunInfo, SeriesName
from pydantic import ValidationError


class MissingRunError(Exception):
    """Stand-in of the library's error."""


class Run(dict[str, Any]):
    """Stand-in of a run: its settings, and notes about it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        if settings.get("run_hash") == "gone":
            raise MissingRunError
        self.settings, self.hash = settings, settings.get("run_hash", "new")
        self.tags: list[str] = []
        self.tracked: list[tuple[Any, ...]] = []
        self.artifacts: str | None = None
        self.logged: list[tuple[str, str, bool]] = []
        self.closed = 0
        self.name = ""
        self.description = "of the library"

    def add_tag(self, tag: str) -> None:
        self.tags.append(tag)

    def set_artifacts_uri(self, uri: str) -> None:
        self.artifacts = uri

    def log_artifact(self, path: str, name: str, block: bool) -> None:
        self.logged.append((path, name, block))

    def track(self, value: Any, name: str, step: int, context: Any) -> None:
        if name == "mixed":
            raise ValueError("Incompatible data types")
        if name == "bad":
            raise ValueError("not a number")
        self.tracked.append((value, name, step, context))

    def close(self) -> None:
        self.closed += 1


class Library(ModuleType):
    """Stand-in of the library: notes which repositories are made anew."""

    def __init__(self) -> None:
        super().__init__("aim")
        self.opened: list[tuple[str, bool]] = []
        self.Repo, self.Run = self, Run
        self.Text = lambda text: ("text", text)
        self.Image = lambda picture: ("image", picture.tolist())
        self.Distribution = lambda hist, bin_range: ("distribution", hist.tolist(), bin_range)
        self.tracker: Any = None

    def from_path(self, place: str, init: bool) -> str:
        if place.endswith("bad"):
            raise RuntimeError("no such repository")
        self.opened.append((place, init))
        return f"repository {place}"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    utils = {"get_environment_variables": lambda: {"HOME": "/h"}, "get_git_info": lambda: {"branch": "b"}}
    modules: dict[str, Any] = {
        "aim": made, "aim.ext": {}, "aim.ext.utils": utils, "aim.sdk": {},
        "aim.sdk.configs": {"get_aim_repo_name": lambda: ".aim"},
        "aim.sdk.errors": {"MissingRunError": MissingRunError},
    }  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module if name == "aim" else SimpleNamespace(**module))
    monkeypatch.delitem(sys.modules, "d9d_aim.tracker", raising=False)
    made.tracker = importlib.import_module("d9d_aim.tracker")
    yield made
    del sys.modules["d9d_aim.tracker"]


def opened(
    library: Library, directory: Path, config: AimConfig, state: Any = None, resumed: int = 0, **facts: Any
) -> Run:
    facts = {"description": "of a test", "hparams": {"lr": 0.1}, **facts}
    info = RunInfo("mine", directory, facts.pop("description"), {"steps": 10}, 10, resumed, **facts)
    run: Any = library.tracker.AimTracker(config).open(info, state)._run
    assert isinstance(run, Run)
    return run


def test_a_repository_is_made_unless_a_whole_one_is_there(library: Library, tmp_path: Path) -> None:
    config = AimConfig(log_system_params=False)
    directory = tmp_path / "runs" / "mine"
    opened(library, directory, config)
    (directory / "aim" / ".aim").mkdir()
    opened(library, directory, config)  # making it was cut short
    (directory / "aim" / ".aim" / "VERSION").write_text("3")
    run = opened(library, directory, config)
    place = str(directory / "aim")
    assert library.opened == [(place, True), (place, True), (place, False)]
    assert run.settings["repo"] == f"repository {place}"
    assert run.artifacts == (directory / "aim" / "artifacts").as_uri()


def test_a_repository_of_the_config_replaces_the_one_of_the_run(library: Library, tmp_path: Path) -> None:
    run = opened(library, tmp_path / "run", AimConfig(repo=str(tmp_path / "shared")))
    assert library.opened == [(str(tmp_path / "shared"), True)]
    assert run.artifacts == (tmp_path / "shared" / "artifacts").as_uri()
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_a_remote_repository_is_neither_made_nor_given_a_directory(library: Library, tmp_path: Path) -> None:
    run = opened(library, tmp_path, AimConfig(repo="aim://host:53800", log_system_params=False))
    assert library.opened == [("aim://host:53800", False)]
    assert run.artifacts is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PluginError, match=r"cannot be opened \(no such repository\); set repo"):
        opened(library, tmp_path, AimConfig(repo="aim://bad"))


def test_a_new_run_is_described_and_a_continued_one_is_not(library: Library, tmp_path: Path) -> None:
    config = AimConfig(experiment="e", log_system_params=False)
    new = opened(library, tmp_path, config, tags=("a", "b"))
    assert (new.name, new.description, new.tags) == ("mine", "of a test", ["a", "b"])
    assert dict(new) == {"hparams": {"lr": 0.1}, "job": {"steps": 10}}
    assert (new.settings["experiment"], new.settings["log_system_params"]) == ("e", False)
    again = opened(library, tmp_path, config, {"hash": "old"}, resumed=3)
    assert (again.hash, again.settings["force_resume"], again.name, dict(again)) == ("old", True, "", {})
    assert again.settings["repo"] == new.settings["repo"] == f"repository {tmp_path / 'aim'}"
    assert again.artifacts == (tmp_path / "aim" / "artifacts").as_uri()
    for state, resumed in ((None, 3), ({"hash": "old"}, 0)):
        assert opened(library, tmp_path, config, state, resumed).hash == "new"


def test_a_run_without_description_and_hyperparameters_has_only_its_job(library: Library, tmp_path: Path) -> None:
    run = opened(library, tmp_path, AimConfig(log_system_params=False), description="", hparams={})
    assert run.description == "of the library"
    assert dict(run) == {"job": {"steps": 10}}
    assert run.tags == []


def test_environment_terminal_and_utilisation_are_stored_unless_switched_off(library: Library, tmp_path: Path) -> None:
    run = opened(library, tmp_path, AimConfig())
    stored = run["__system_params"]
    assert stored["packages"]["pytest"] == pytest.__version__
    assert (stored["env_variables"], stored["git_info"]) == ({"HOME": "/h"}, {"branch": "b"})
    assert (stored["executable"], stored["arguments"]) == (sys.executable, sys.argv)
    assert (run.settings["capture_terminal_logs"], run.settings["system_tracking_interval"]) == (True, 10.0)
    assert run.settings["log_system_params"] is False  # stored by the tracker, not by the library
    silent = AimConfig(log_system_params=False, capture_terminal_logs=False, system_tracking_interval=None)
    run = opened(library, tmp_path, silent)
    assert "__system_params" not in run
    assert (run.settings["capture_terminal_logs"], run.settings["system_tracking_interval"]) == (False, None)


def test_a_run_that_is_gone_is_an_error_or_replaced(
    library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"the Aim repository {tmp_path / 'aim'} no longer has the run 'gone' of this job"
    with pytest.raises(PluginError) as error:
        opened(library, tmp_path, AimConfig(), {"hash": "gone"}, 1)
    assert str(error.value) == f"{said}; set 'lost_run: new' of the tracker 'aim' to go on in a new run"
    run = opened(library, tmp_path, AimConfig(lost_run="new"), {"hash": "gone"}, 1)
    assert (run.hash, run.name, run["job"]) == ("new", "mine", {"steps": 10})
    assert capsys.readouterr().err == f"warning: {said}; a new run replaces it\n"


def test_values_of_each_kind_have_their_tags_and_names(library: Library, tmp_path: Path) -> None:
    made: Any = Run()
    run = library.tracker.AimRun(made)
    run.write(3, {"loss": 1.5, SeriesName("loss", {"stage": "eval"}): 2.0})
    run.write_histograms(4, {"gradients": Histogram(torch.tensor([1.0, 3.0]), -1.0, 2.0)})
    run.write_texts(5, {"said": "yes", "mixed": "no"})
    run.write_pictures(6, {"p": torch.tensor([[[1, 2, 3]]], dtype=torch.uint8)})
    run.write(7, {"mixed": 2.5})
    run.write_files(8, {"notes": tmp_path / "a.txt"})
    assert made.tracked == [
        (1.5, "loss", 3, {}),
        (2.0, "loss", 3, {"stage": "eval"}),
        (("distribution", [1.0, 3.0], (-1.0, 2.0)), "gradients", 4, {}),
        (("text", "yes"), "said", 5, {}),
        (("text", "no"), "mixed (text)", 5, {}),
        (("image", [[[1, 2, 3]]]), "p", 6, {}),
        (2.5, "mixed (number)", 7, {}),
    ]
    assert made.logged == [(str(tmp_path / "a.txt"), "notes/8.txt", True)]
    with pytest.raises(ValueError, match="not a number"):
        run.write(9, {"bad": 1.0})


def test_a_run_ends_once_and_takes_nothing_more(library: Library) -> None:
    made: Any = Run()
    run = library.tracker.AimRun(made)
    assert run.state() == {"hash": "new"}
    run.flush()
    run.close("stopped")
    run.close("finished")
    assert (made["status"], made.closed) == ("stopped", 1)
    for call in (run.flush, lambda: run.write(5, {}), lambda: run.write_files(5, {})):
        with pytest.raises(ValueError, match="the run is closed"):
            call()


def test_an_address_has_to_be_a_server_of_aim_and_an_interval_positive() -> None:
    assert AimConfig(repo="aim://host:53800").repo == "aim://host:53800"
    assert AimConfig(repo="shared/aim").repo == "shared/aim"
    with pytest.raises(ValidationError, match="an address must name a server, aim://host:port; otherwise give"):
        AimConfig(repo="https://host")
    assert AimConfig(system_tracking_interval=0.5).system_tracking_interval == 0.5
    with pytest.raises(ValidationError, match="greater than 0"):
        AimConfig(system_tracking_interval=0)
