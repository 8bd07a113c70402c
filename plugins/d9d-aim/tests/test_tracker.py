"""Values that the tracker writes are read back through Aim's repository."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

aim = pytest.importorskip("aim")

from aim.sdk.index_manager import RepoIndexManager  # noqa: E402
from aim.storage.context import Context  # noqa: E402
from d9d_aim.config import AimConfig  # noqa: E402
from d9d_aim.tracker import AimTracker  # noqa: E402
from d9d_core.errors import PluginError  # noqa: E402
from d9d_core.tracker import Histogram, RunInfo, SeriesName  # noqa: E402
from d9d_testing.suites.tracker import Logged, TrackerSuite, by_step  # noqa: E402
from torch import tensor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
QUIET: Mapping[str, Any] = {
    "log_system_params": False, "capture_terminal_logs": False, "system_tracking_interval": None,
}  # fmt: skip


def newest(directory: Path) -> Any:
    repo = aim.Repo.from_path(str(directory / "aim"))
    hashes = repo.list_all_runs()
    for one in hashes:
        RepoIndexManager.get_index_manager(repo).index(one)
    return max((aim.Run(one, repo=repo, read_only=True) for one in hashes), key=lambda run: run.creation_time)


def joined(name: str, context: Any) -> str:
    return SeriesName(name, context.to_dict())


def points(run: Any) -> Iterator[tuple[int, str, float]]:
    for one in run.metrics():
        steps, (values, *_) = one.data.items_list()
        yield from ((step, joined(one.name, one.context), value) for step, value in zip(steps, values, strict=True))


def info(directory: Path, resumed_step: int = 0, **facts: Any) -> RunInfo:
    return RunInfo("mine", directory, "of a test", {"steps": 10}, 10, resumed_step, **facts)


@pytest.fixture(autouse=True)
def prepared(tmp_path: Path, empty: Path) -> None:
    """A repository in the directory of the run: making one takes seconds."""
    shutil.copytree(empty, tmp_path / "aim")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aim")
    aim.Repo.from_path(str(folder), init=True).close()
    return folder


class TestAim(TrackerSuite):
    pytestmark = pytest.mark.full

    target = "aim"
    config: ClassVar = QUIET
    patience: ClassVar = 10.0
    rewinds: ClassVar = False

    def logged(self, directory: Path) -> Logged:
        return by_step(points(newest(directory)))

    def logged_kind(self, directory: Path, kind: str) -> Mapping[int, Sequence[str]]:
        return {step: list(contents) for step, contents in self.logged_contents(directory, kind).items()}

    def logged_contents(self, directory: Path, kind: str) -> Mapping[int, Mapping[str, Any]]:
        run = newest(directory)
        type_of, get, content = {
            "histograms": ("aim.distribution", run.get_distribution_sequence, lambda value: value.weights.tolist()),
            "texts": ("aim.text", run.get_text_sequence, lambda value: value.data),
            "pictures": ("aim.image", run.get_image_sequence, lambda value: np.asarray(value.to_pil_image()).tolist()),
        }[kind]
        found: dict[int, dict[str, Any]] = {}
        for name, context, _ in run.iter_sequence_info_by_type(type_of):
            steps, (values, *_rest) = get(name, context).data.items_list()
            for step, value in zip(steps, values, strict=True):
                found.setdefault(step, {})[joined(name, context)] = content(value)
        return found

    def logged_file(self, directory: Path, name: str) -> bytes:
        (path,) = (directory / "aim" / "artifacts").glob(f"*/{name}/1.txt")
        return path.read_bytes()


@pytest.mark.full
def test_a_run_says_what_it_is_and_its_histograms_have_bounds(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"hparams": {"optimizer": {"lr": 0.1}}, "tags": ("sweep",)}
    run = AimTracker(AimConfig(experiment="mine", **QUIET)).open(info(tmp_path, **facts), None)
    run.write_histograms(2, {"gradients": Histogram(tensor([1.0, 3.0]), -1.0, 2.0)})
    run.close("stopped")
    found = newest(tmp_path)
    assert (found.name, found.description, found.experiment, found.tags) == ("mine", "of a test", "mine", ["sweep"])
    assert (found["hparams"], found["job"], found["status"]) == ({"optimizer": {"lr": 0.1}}, {"steps": 10}, "stopped")
    value = found.get_distribution_sequence("gradients", Context({})).data.values_list()[0][0]
    assert (value.range, value.weights.tolist()) == ([-1.0, 2.0], [1.0, 3.0])


@pytest.mark.full
def test_a_run_that_is_gone_is_said_or_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AimTracker(AimConfig(**QUIET)).open(info(tmp_path), None).close("stopped")
    with pytest.raises(PluginError, match="no longer has the run 'gone'.* set 'lost_run: new' of the tracker 'aim'"):
        AimTracker(AimConfig(**QUIET)).open(info(tmp_path, 1), {"hash": "gone"})
    run = AimTracker(AimConfig(lost_run="new", **QUIET)).open(info(tmp_path, 1), {"hash": "gone"})
    run.close("finished")
    assert run.state()["hash"] != "gone"
    assert "a new run replaces it" in capsys.readouterr().err


def test_a_repository_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PluginError, match="the Aim repository .*file/aim cannot be opened .* set repo of the tracker"):
        AimTracker(AimConfig()).open(info(tmp_path / "file"), None)
