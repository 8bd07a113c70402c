"""Values that the tracker writes are read back with TensorBoard's own reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import PluginError
from d9d_core.metric import Table
from d9d_core.tracker import Histogram, RunInfo
from d9d_tensorboard.config import TensorBoardConfig
from d9d_tensorboard.tracker import TensorBoardTracker
from d9d_testing.suites.tracker import Logged, TrackerSuite, by_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, TensorEvent
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PluginEventAccumulator,
)
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray
from torch import tensor

#: Kind of values -> the reader's plugin of it.
PLUGINS = {"histograms": "histograms", "texts": "text"}


def read(directory: Path) -> EventAccumulator:
    reader = EventAccumulator(
        str(directory), size_guidance=dict.fromkeys(("scalars", "tensors", "histograms", "images"), 0)
    )
    reader.Reload()
    return reader


def texts(reader: EventAccumulator, name: str) -> dict[int, str]:
    events: list[TensorEvent] = reader.Tensors(f"{name}/text_summary")
    return {event.step: make_ndarray(event.tensor_proto).item().decode() for event in events}


def opened(directory: Path, resumed_step: int = 0, state: Any = None, **facts: Any) -> Any:
    run = RunInfo("mine", directory, "of a test", {"steps": 10}, 10, resumed_step, **facts)
    return TensorBoardTracker(TensorBoardConfig()).open(run, state)


class TestTensorBoard(TrackerSuite):
    target = "tensorboard"

    def logged(self, directory: Path) -> Logged:
        reader = read(directory / "tensorboard")
        names = reader.Tags()["scalars"]
        return by_step((event.step, name, event.value) for name in names for event in reader.Scalars(name))

    def logged_tables(self, directory: Path) -> Mapping[int, Sequence[str]]:
        return self.logged_kind(directory, "texts")

    def logged_kind(self, directory: Path, kind: str) -> Mapping[int, Sequence[str]]:
        reader = read(directory / "tensorboard")
        tags: dict[str, Any] = reader.Tags()
        if kind == "texts":
            series = {tag.removesuffix("/text_summary"): reader.Tensors(tag) for tag in tags["tensors"]}
        elif kind == "pictures":
            series = {tag: reader.Images(tag) for tag in tags["images"]}
        else:
            series = {tag: reader.Histograms(tag) for tag in tags["histograms"]}
        found: dict[int, list[str]] = {}
        for name, events in series.items():
            for event in events:
                if event.step:  # step 0 has the description of the run
                    found.setdefault(event.step, []).append(name)
        return found

    def logged_contents(self, directory: Path, kind: str) -> Mapping[int, Mapping[str, Any]] | None:
        reader = read(directory / "tensorboard")
        tags: dict[str, Any] = reader.Tags()
        found: dict[int, dict[str, Any]] = {}
        if kind == "texts":
            for name in (tag.removesuffix("/text_summary") for tag in tags["tensors"]):
                for step, text in texts(reader, name).items():
                    if step:  # step 0 has the description of the run
                        found.setdefault(step, {})[name] = text
            return found
        if kind == "histograms":
            for tag in tags["histograms"]:
                for event in reader.Histograms(tag):
                    found.setdefault(event.step, {})[tag] = list(event.histogram_value.bucket)
            return found
        return None


def test_name_tags_and_hyperparameters_are_there_once(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"hparams": {"optimizer": {"lr": 0.1}, "size": None}, "tags": ("sweep", "first")}
    opened(tmp_path, **facts).close("stopped")
    run = opened(tmp_path, 4, **facts)
    run.write(5, {"loss": 1.0})
    run.close("finished")
    reader = read(tmp_path / "tensorboard")
    said = texts(reader, "run")
    assert list(said) == [0]
    for part in ("# mine", "of a test", "Tags: sweep, first", "| optimizer/lr | 0.1 |", "| size | null |"):
        assert part in said[0]
    assert '"steps": 10' in texts(reader, "job")[0]
    assert "_hparams_/session_start_info" in reader.summary_metadata
    assert [event.step for event in reader.Scalars("loss")] == [5]


def test_what_came_between_a_checkpoint_and_the_next_step_is_there_once_after_a_resume(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.write(4, {"loss": 1.0})
    run.flush()
    state = run.state()
    run.write(4, {"reward": 1.0})
    run.write(5, {"loss": 1.0})
    run.close("failed")
    for reward in (2.0, 3.0):  # the second one resumes at the same checkpoint, over two files
        again = opened(tmp_path, 4, state)
        assert again.state() == state
        again.write(4, {"reward": reward})
        again.close("failed")
    reader = read(tmp_path / "tensorboard")
    found = {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in ("loss", "reward")}
    assert found == {"loss": [(4, 1.0)], "reward": [(4, 3.0)]}


def test_a_clock_that_goes_back_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = None
    for step, now in enumerate([2e9, 1e9, 1.5e9, 1e9]):
        monkeypatch.setattr("time.time", lambda now=now: now)
        run = opened(tmp_path, step, state)
        run.write(step, {"late": float(step)})
        run.write(step + 1, {"loss": float(step)})
        run.flush()
        state = run.state()
        run.write(step + 1, {"late": -1.0})
        run.close("failed")
    reader = read(tmp_path / "tensorboard")
    found = {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in ("loss", "late")}
    assert found["loss"] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert found["late"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, -1.0)]


def test_one_name_of_several_kinds_is_one_tag_for_each(tmp_path: Path) -> None:
    counts = Histogram(tensor([1, 0, 3]), -1.0, 2.0)
    run = opened(tmp_path)
    run.write(1, {"loss": 1.0, "said/text_summary": 1.0})
    run.flush()
    state = run.state()
    run.close("failed")
    for step in (1, 2):
        run = opened(tmp_path, 1, state)
        run.write_histograms(step, {"loss": counts})
        run.write_texts(step, {"loss": "a text", "said": "a text"})
        run.write(step, {"loss": 2.0})
        run.close("failed")
    reader = PluginEventAccumulator(str(tmp_path / "tensorboard")).Reload()  # reads as the web interface does
    plugins: dict[str, list[str]] = {}
    for tag in reader.Tags()["tensors"]:
        plugins.setdefault(reader.SummaryMetadata(tag).plugin_data.plugin_name, []).append(tag)
    assert sorted(plugins["scalars"]) == ["loss", "said/text_summary"]
    assert plugins["histograms"] == ["loss (histogram)"]
    assert {"loss/text_summary", "said (text)/text_summary"} <= set(plugins["text"])


def test_histograms_keep_their_counts_and_bounds(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.write_histograms(3, {"gradients": Histogram(tensor([1, 0, 3]), -1.0, 2.0)})
    run.close("finished")
    (event,) = read(tmp_path / "tensorboard").Histograms("gradients")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num) == (3, -1.0, 2.0, 4.0)
    assert (list(value.bucket_limit), list(value.bucket)) == ([0.0, 1.0, 2.0], [1.0, 0.0, 3.0])
    assert value.sum == pytest.approx(1 * -0.5 + 3 * 1.5)
    assert value.sum_squares == pytest.approx(1 * 0.25 + 3 * 2.25)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PluginError, match="file/tensorboard cannot be written .* set log_dir of the tracker"):
        opened(tmp_path / "file")


@pytest.mark.parametrize(("first", "second"), [("lr.base", "base"), ("same", "same")])
def test_runs_that_share_a_directory_leave_the_files_of_each_other_alone(
    tmp_path: Path, first: str, second: str
) -> None:
    config = TensorBoardConfig(log_dir=tmp_path / "shared")
    for number, name in enumerate((first, second, second)):  # the last one starts anew in the directory of the second
        info = RunInfo(name, tmp_path / str(min(number, 1)) / name, "", {}, 10, 0)
        run = TensorBoardTracker(config).open(info, None)
        run.write(1, {f"loss/{number}": 1.0})
        run.close("finished")
    reader = EventAccumulator(str(tmp_path / "shared")).Reload()
    assert set(reader.Tags()["scalars"]) == {"loss/0", "loss/2"}


def test_events_are_flushed_after_the_seconds_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("d9d_tensorboard.tracker.time.monotonic", lambda: now)
    run = RunInfo("mine", tmp_path, "of a test", {"steps": 10}, 10, 0)
    opened_run = TensorBoardTracker(TensorBoardConfig(flush_seconds=5)).open(run, None)
    opened_run.write(1, {"loss": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    before = file.stat().st_size
    now = 104.0
    opened_run.write(2, {"loss": 1.0})
    assert file.stat().st_size == before
    now = 105.0
    opened_run.write(3, {"loss": 1.0})
    assert file.stat().st_size > before
    opened_run.close("finished")


def events(directory: Path) -> list[Any]:
    (file,) = directory.iterdir()
    return [Event.FromString(content) for content in RawEventFileLoader(str(file)).Load()]


def test_a_new_run_begins_at_step_0_with_its_summary_which_is_flushed(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "mine"
    run = opened(directory, hparams={"lr": 0.1, "layers": [1, 2]})
    first, second, *values = events(directory / "tensorboard")  # before it is closed
    assert (first.step, first.file_version) == (0, "brain.Event:2")
    assert (second.step, second.session_log.status) == (0, SessionLog.START)
    assert {event.step for event in values} == {0}
    tags = [value.tag for event in values for value in event.summary.value]
    assert tags[-2:] == ["run/text_summary", "job/text_summary"]
    assert run.state() == {"values": len(values)}
    run.write(1, {"loss": 1.0, "lr": 2.0})
    assert run.state() == {"values": len(values) + 2}
    run.close("finished")
    reader = read(directory / "tensorboard")
    assert texts(reader, "run") == {
        0: "# mine\n\nof a test\n\n| name | value |\n| --- | --- |\n| lr | 0.1 |\n| layers | [1, 2] |"
    }
    assert texts(reader, "job") == {0: '```json\n{\n  "steps": 10\n}\n```'}
    metadata = reader.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert set(HParamsPluginData.FromString(metadata).session_start_info.hparams) == {"lr", "layers"}


def test_a_run_without_hyperparameters_tags_and_description_has_its_name(tmp_path: Path) -> None:
    run = TensorBoardTracker(TensorBoardConfig()).open(RunInfo("mine", tmp_path, "", {}, 10, 0), None)
    assert run.state() == {"values": 2}
    run.close("finished")
    assert texts(read(tmp_path / "tensorboard"), "run") == {0: "# mine"}


def test_a_resumed_run_says_after_which_step_events_are_void(tmp_path: Path) -> None:
    run = opened(tmp_path, 4, {"values": 0})
    run.close("failed")
    assert [event.step for event in events(tmp_path / "tensorboard")] == [5, 5]
    assert run.state() == {"values": 0}


def test_a_table_is_a_text_with_four_digits(tmp_path: Path) -> None:
    run = opened(tmp_path)
    values = tensor([[1.0, 0.123456], [float("nan"), 20000.0]])
    run.write_tables(3, {"load": Table(values, row="layer", column="expert", unit="share", rows=("a", "b"))})
    run.write_tables(4, {"load": Table(values[:, :1], row="layer", column="expert", unit="share")})
    run.close("finished")
    assert texts(read(tmp_path / "tensorboard"), "load") == {
        3: "share\n\n| layer / expert | 0 | 1 |\n| --- | --- | --- |\n| a | 1 | 0.1235 |\n| b | nan | 2e+04 |",
        4: "share\n\n| layer / expert | 0 |\n| --- | --- |\n| 0 | 1 |\n| 1 | nan |",
    }


def test_a_closed_run_takes_nothing_more(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.close("finished")
    run.close("failed")
    calls: list[Callable[[], Any]] = [
        run.flush, lambda: run.write(1, {}), lambda: run.write_histograms(1, {}), lambda: run.write_texts(1, {}),
        lambda: run.write_pictures(1, {}),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="the run is closed"):
            call()


def test_a_name_with_a_suffix_that_another_kind_has_taken_gets_one_too(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.write(1, {"loss": 1.0})
    run.write_histograms(1, {"loss": Histogram(tensor([1]), 0.0, 1.0)})
    run.write(2, {"loss (histogram)": 3.0})
    run.close("finished")
    reader = read(tmp_path / "tensorboard")
    assert set(reader.Tags()["scalars"]) == {"loss", "loss (histogram) (number)"}
    assert set(reader.Tags()["histograms"]) == {"loss (histogram)"}


def test_the_number_in_a_file_s_name_is_the_time_or_above_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 0.5)
    directory = tmp_path / "tensorboard"
    opened(tmp_path).close("finished")
    assert [path.name.split(".")[3] for path in directory.iterdir()] == ["0000000001"]
    (directory / "events.out.tfevents.0000000007.other").write_bytes(b"")
    (directory / "events.out.tfevents.1234567890123.far").write_bytes(b"")  # no time in seconds
    opened(tmp_path, 3).close("finished")
    monkeypatch.setattr("time.time", lambda: 12.5)
    opened(tmp_path, 3).close("finished")
    found = sorted(path.name.split(".")[3] for path in directory.glob("*.d9d"))
    assert found == ["0000000001", "0000000008", "0000000012"]
