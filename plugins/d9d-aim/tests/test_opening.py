"""Repository and run of the tracker, over stand-ins of the library's classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aim")

from d9d_aim import tracker as module
from d9d_aim.config import AimConfig
from d9d_aim.tracker import AimRun, AimTracker
from d9d_core.errors import PluginError
from d9d_core.tracker import RunInfo


class Run(dict[str, Any]):
    """Stand-in of a run: its settings, and what is said about it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings, self.hash = settings, settings.get("run_hash", "new")
        self.tags: list[str] = []
        self.tracked: list[tuple[Any, ...]] = []
        self.artifacts: str | None = None
        self.closed = 0
        self.name = self.description = ""

    def add_tag(self, tag: str) -> None:
        self.tags.append(tag)

    def set_artifacts_uri(self, uri: str) -> None:
        self.artifacts = uri

    def track(self, value: Any, name: str, step: int, context: Any) -> None:
        if name == "mixed":
            raise ValueError("Incompatible data types")
        self.tracked.append((value, name, step, context))

    def close(self) -> None:
        self.closed += 1


class Library:
    """Stand-in of the library: notes which repositories are made anew."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, bool]] = []
        self.Repo = self
        self.Run = Run

    def from_path(self, place: str, init: bool) -> str:
        if place.endswith("bad"):
            raise RuntimeError("no such repository")
        self.opened.append((place, init))
        return place


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(module, "aim", made)
    monkeypatch.setattr(module, "get_aim_repo_name", lambda: ".aim")
    return made


def opened(directory: Path, config: AimConfig, state: Any = None, resumed: int = 0, tags: Sequence[str] = ()) -> Run:
    info = RunInfo("mine", directory, "of a test", {"steps": 10}, 10, resumed, hparams={"lr": 0.1}, tags=tuple(tags))
    run: Any = AimTracker(config).open(info, state)._run
    assert isinstance(run, Run)
    return run


def test_a_repository_is_made_unless_a_whole_one_is_there(library: Library, tmp_path: Path) -> None:
    config = AimConfig(log_system_params=False)
    opened(tmp_path, config)
    (tmp_path / "aim" / ".aim").mkdir()
    opened(tmp_path, config)  # making it was cut short
    (tmp_path / "aim" / ".aim" / "VERSION").write_text("3")
    run = opened(tmp_path, config)
    place = str(tmp_path / "aim")
    assert library.opened == [(place, True), (place, True), (place, False)]
    assert run.artifacts == (tmp_path / "aim" / "artifacts").as_uri()


def test_a_remote_repository_is_neither_made_nor_given_a_directory(library: Library, tmp_path: Path) -> None:
    run = opened(tmp_path, AimConfig(repo="aim://host:53800", log_system_params=False))
    assert library.opened == [("aim://host:53800", False)]
    assert run.artifacts is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PluginError, match=r"cannot be opened \(no such repository\); set repo"):
        opened(tmp_path, AimConfig(repo="aim://bad"))


@pytest.mark.usefixtures("library")
def test_a_new_run_is_described_and_a_continued_one_is_not(tmp_path: Path) -> None:
    config = AimConfig(experiment="e", log_system_params=False)
    new = opened(tmp_path, config, tags=["a", "b"])
    assert (new.name, new.description, new.tags) == ("mine", "of a test", ["a", "b"])
    assert dict(new) == {"hparams": {"lr": 0.1}, "job": {"steps": 10}}
    assert (new.settings["experiment"], new.settings["log_system_params"]) == ("e", False)
    again = opened(tmp_path, config, {"hash": "old"}, resumed=3)
    assert (again.hash, again.settings["force_resume"], again.name, dict(again)) == ("old", True, "", {})
    for state, resumed in ((None, 3), ({"hash": "old"}, 0)):
        assert opened(tmp_path, config, state, resumed).hash == "new"


def test_values_have_their_tags_and_a_series_of_two_kinds_two_names() -> None:
    made: Any = Run()
    run = AimRun(made)
    run.write(3, {"loss": 1.5})
    run.write(4, {"mixed": 2.5})
    assert made.tracked == [(1.5, "loss", 3, {}), (2.5, "mixed (number)", 4, {})]
    assert run.state() == {"hash": "new"}
    run.flush()
    run.close("stopped")
    run.close("finished")
    assert (made["status"], made.closed) == ("stopped", 1)
    for call in (run.flush, lambda: run.write(5, {})):
        with pytest.raises(ValueError, match="the run is closed"):
            call()
