"""Choice of models, checkpoints and data for evaluation and generation."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from d9d_core.errors import CheckpointError, DataError, JobError
from d9d_core.job_file.job import BaseJob
from d9d_core.registry.registry import Registry
from d9d_inference.commands import model_files
from d9d_inference.commands.model_files import found_model
from d9d_inference.evaluation import subject
from d9d_inference.evaluation.choice import choose_checkpoint
from d9d_inference.evaluation.content import dataset_of
from d9d_inference.evaluation.subject import Request, find_subject
from d9d_inference.generation import tokenizer_files
from d9d_inference.generation.tokenizer_files import ends_of_text

NO_REGISTRY = cast("Registry", None)


class Store:
    """Stand-in of a checkpoint store with checkpoints of some steps, of which one may be the best."""

    def __init__(self, *steps: int, best: int | None = None, ruled: bool = True) -> None:
        self.directory = "run/checkpoints"
        self.retention = SimpleNamespace(best=SimpleNamespace(series="eval/loss") if ruled else None)
        self._steps, self._best = steps, best

    def steps(self) -> list[int]:
        return list(self._steps)

    def best(self) -> tuple[int, float] | None:
        return None if self._best is None else (self._best, 0.5)

    def open(self, folder: str) -> str:
        return folder

    def newest(self, _warn: object) -> str:
        return "newest one"


def chosen(store: Store, which: Any) -> object:
    return choose_checkpoint(cast("Any", store), which, print)


def test_a_checkpoint_is_chosen_by_its_step_or_as_the_newest_or_the_best() -> None:
    store = Store(20, 3, best=20)
    assert chosen(store, "newest") == "newest one"
    assert chosen(store, "best") == "step-00000020"
    assert chosen(store, 3) == "step-00000003"
    with pytest.raises(CheckpointError, match=r"run/checkpoints has no checkpoint of step 4; there are: 3, 20$"):
        chosen(store, 4)
    with pytest.raises(CheckpointError, match=r"there are: none$"):
        chosen(Store(), 4)


def test_without_a_rule_or_a_value_no_checkpoint_is_the_best() -> None:
    with pytest.raises(CheckpointError, match="no 'checkpoint.best'"):
        chosen(Store(1, ruled=False), "best")
    with pytest.raises(CheckpointError, match="no checkpoint has a value of 'eval/loss'"):
        chosen(Store(1), "best")


def written(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


@pytest.mark.parametrize(
    ("name", "records", "dataset"),
    [
        ("a.txt", ["some text"], {"name": "documents"}),
        ("a.jsonl", [{"text": "x"}], {"name": "documents", "field": "text"}),
        ("a.ndjson", ["", "  ", {"text": "x"}], {"name": "documents", "field": "text"}),
        ("a.jsonl", [{"messages": []}], {"name": "chat"}),
        ("a.jsonl", [{"prompt": "a", "completion": "b"}], {"name": "chat"}),
    ],
)
def test_the_dataset_of_a_file_follows_from_its_first_record(
    tmp_path: Path, name: str, records: list[object], dataset: dict[str, Any]
) -> None:
    path = written(tmp_path / name, *records)
    like = {"tokenizer": "tok", "sequence_length": 64, "sources": ["other"], "seed": 3}
    assert dataset_of(path, like) == {"sources": [str(path)], "tokenizer": "tok", "sequence_length": 64, **dataset}


def test_settings_of_conversations_stay_with_conversations(tmp_path: Path) -> None:
    chat = written(tmp_path / "chat.jsonl", {"messages": []})
    text = written(tmp_path / "text.jsonl", {"text": "x"})
    like = {"loss": "all", "template_arguments": {}, "tool_arguments": "x", "end_of_text": "</s>", "tokenizer": "bytes"}
    assert dataset_of(chat, like).keys() == {"name", "sources", "loss", "template_arguments", "tool_arguments"}
    assert dataset_of(text, like).keys() == {"name", "sources", "field", "end_of_text", "tokenizer"}
    with pytest.raises(JobError, match="the job trains a tokenizer on its data"):
        dataset_of(text, {"tokenizer": {"vocab_size": 300}})
    assert "tokenizer" not in dataset_of(chat, {"tokenizer": {"vocab_size": 300}})


@pytest.mark.parametrize(
    ("like", "multiple"),
    [
        ({"sequence_length": 64}, None),
        ({"sequence_length": 63}, 1),
        ({"sequence_length": 63, "pad_multiple": 7}, 7),
        ({"sequence_length": 64, "pad_multiple": 7}, 1),
        ({}, None),
    ],
)
def test_a_length_that_padding_does_not_divide_is_not_padded(
    tmp_path: Path, like: dict[str, int], multiple: int | None
) -> None:
    assert dataset_of(written(tmp_path / "a.txt", "x"), like).get("pad_multiple") == multiple


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("a.jsonl", "{", "a.jsonl: the first record is not JSON"),
        ("a.jsonl", {"input": 1, "output": 2}, "a.jsonl has input, output; give records"),
        ("a.jsonl", {"prompt": 1}, "a.jsonl has prompt; give records"),
        ("a.jsonl", dict.fromkeys("abcdefghijklmnopqrstu", 1), "q, r, s, t; give records"),
        ("a.jsonl", [], "has no fields; give records"),
        ("a.txt", "", "a.txt is empty"),
    ],
)
def test_a_file_of_other_records_is_refused(tmp_path: Path, name: str, record: object, said: str) -> None:
    with pytest.raises(JobError) as error:
        dataset_of(written(tmp_path / name, record), {})
    assert said in str(error.value)


def test_a_missing_file_of_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="--data: .*none.txt cannot be read: No such file"):
        dataset_of(tmp_path / "none.txt", {})


def model_in(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def adapter_in(directory: Path, base: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return directory


def test_a_model_is_found_in_its_directory_and_in_that_of_its_run(tmp_path: Path) -> None:
    model = model_in(tmp_path / "run" / "model")
    origins = []
    for location in (model, tmp_path / "run"):
        with found_model(str(location), NO_REGISTRY, print) as found:
            assert (found.directory, found.adapter) == (model, None)
            origins.append(found.origin)
    assert origins[0] == origins[1]
    (model / "config.json").write_text("{ }")
    with found_model(str(model), NO_REGISTRY, print) as found:
        assert found.origin != origins[0]


def test_a_checkpoint_is_exported_for_as_long_as_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    location = f"newest of {tmp_path}"
    tensors = nullcontext(SimpleNamespace(location=location))
    monkeypatch.setattr(model_files, "is_checkpoint", lambda given: given == str(tmp_path))
    monkeypatch.setattr(model_files, "CheckpointTensors", {str(tmp_path): tensors}.__getitem__)
    monkeypatch.setattr(model_files, "_export", lambda *given: asked.append(given))
    note = asked.append
    with found_model(str(tmp_path), NO_REGISTRY, note) as found:
        assert found.directory.parent.is_dir()
    assert (found.adapter, found.origin) == (None, location)
    told = f"exporting {location} to a temporary directory"
    assert asked == [told, (location, found.directory, NO_REGISTRY, note)]
    assert not found.directory.parent.exists()


def test_an_adapter_that_cannot_be_read_needs_a_base(tmp_path: Path) -> None:
    said = r"adapter_config.json cannot be read: No such file or directory; name the base model with --base MODEL$"
    with pytest.raises(CheckpointError, match=said):
        model_files._base_of(tmp_path)


def test_an_adapter_is_found_with_the_base_that_it_or_the_user_names(tmp_path: Path) -> None:
    base, other = model_in(tmp_path / "base"), model_in(tmp_path / "other")
    adapter = adapter_in(tmp_path / "run" / "adapter", str(base))
    for location in (adapter, tmp_path / "run"):
        with found_model(str(location), NO_REGISTRY, print) as found:
            assert (found.directory, found.adapter) == (base, adapter)
            assert str(adapter) in found.origin
            assert str(base) in found.origin
    with found_model(str(adapter), NO_REGISTRY, print, base=str(other)) as found:
        assert found.directory == other


def test_an_export_is_used_before_an_adapter(tmp_path: Path) -> None:
    adapter_in(tmp_path / "adapter", str(tmp_path))
    model = model_in(tmp_path / "model")
    with found_model(str(tmp_path), NO_REGISTRY, print) as found:
        assert (found.directory, found.adapter) == (model, None)


@pytest.mark.parametrize("base", ["no/such/model", None, 7])
def test_an_adapter_whose_base_is_not_here_asks_for_it(tmp_path: Path, base: object) -> None:
    adapter = adapter_in(tmp_path / "adapter", base)
    with (
        pytest.raises(CheckpointError, match="which this machine lacks; name its directory with --base"),
        found_model(str(adapter), NO_REGISTRY, print),
    ):
        pass


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    first = adapter_in(tmp_path / "first", str(model_in(tmp_path / "base")))
    second = adapter_in(tmp_path / "second", str(first))
    with (
        pytest.raises(CheckpointError, match="an adapter too; name a full model"),
        found_model(str(second), NO_REGISTRY, print),
    ):
        pass


def test_what_is_no_model_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "config.json")
    for location, said in (
        ("s3://bucket/x", "is a remote address"),
        (str(tmp_path / "none"), "does not exist (from "),
        (str(tmp_path / "empty"), "has neither a config.json nor checkpoints"),
        (str(tmp_path / "pipe"), "is no regular file"),
    ):
        with pytest.raises(CheckpointError) as error, found_model(location, NO_REGISTRY, print):
            pass
        assert said in str(error.value)


def test_the_tokenizer_of_the_run_replaces_that_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("new")
    (tmp_path / "target" / "tokenizer.json").write_text("old")
    said: list[str] = []
    model_files._copy_tokenizer(tmp_path / "source", tmp_path / "target", said.append)
    assert ((tmp_path / "target" / "tokenizer.json").read_text(), said) == ("new", [])
    model_files._copy_tokenizer(tmp_path / "none", tmp_path / "target", said.append)
    assert len(said) == 1
    assert said[0].startswith("no tokenizer from the run's data")
    (tmp_path / "source" / "link").symlink_to(tmp_path / "target" / "tokenizer.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        model_files._copy_tokenizer(tmp_path / "source", tmp_path / "target", said.append)


def test_the_origin_of_a_run_is_the_local_model_that_it_started_from(tmp_path: Path) -> None:
    model = model_in(tmp_path / "base")

    def origin(values: object) -> str | None:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
        return model_files._origin(tmp_path)

    assert model_files._origin(None) is None
    assert model_files._origin(tmp_path) is None
    assert origin({"model": {"name": "x", "pretrained": str(model)}}) == str(model)
    assert origin({"model": {"name": "x", "pretrained": str(tmp_path / "none")}}) is None
    assert origin({"model": {"name": "x"}}) is None
    assert origin({"model": "x"}) is None


def job_of(directory: Path | None) -> BaseJob:
    """Stand-in of a job with pretrained weights."""
    return cast("BaseJob", SimpleNamespace(directory=directory))


@pytest.mark.parametrize(
    ("generation", "config", "facts", "ends"),
    [
        (None, None, {}, set()),
        (None, None, {"eos_token_id": 3}, {3}),
        (None, {"eos_token_id": 2}, {"eos_token_id": 3}, {2}),
        ({"eos_token_id": [4, 5]}, {"eos_token_id": 2}, {"eos_token_id": 3}, {4, 5}),
        ({}, {"eos_token_id": 2}, {}, {2}),
        ([], {}, {"eos_token_id": 3, "stop_token_ids": [7, 8]}, {3, 7, 8}),
        ({"eos_token_id": "x"}, {"eos_token_id": 2}, {"eos_token_id": 3}, set()),
    ],
)
def test_the_model_says_what_ends_a_text_before_the_data_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: Any, config: Any, facts: dict[str, Any], ends: set[int]
) -> None:
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        if values is not None:
            (tmp_path / name).write_text(json.dumps(values))
    monkeypatch.setattr(tokenizer_files, "_directories", lambda _job: [tmp_path])
    assert ends_of_text(job_of(tmp_path), facts) == ends


def test_a_damaged_config_of_generation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    monkeypatch.setattr(tokenizer_files, "_directories", lambda _job: [tmp_path])
    with pytest.raises(DataError, match=r"generation_config.json cannot be read"):
        ends_of_text(job_of(tmp_path), {})


@pytest.mark.parametrize("checkpoint", ["latest", "-1", "1.5", ""])
def test_a_checkpoint_is_named_as_newest_best_or_by_its_step(tmp_path: Path, checkpoint: str) -> None:
    with pytest.raises(JobError, match="use newest, best, or the number of a step"):
        find_subject(str(tmp_path), Request(checkpoint=checkpoint), NO_REGISTRY)


def test_a_place_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="it does not exist; give a job file"):
        find_subject(str(tmp_path / "none"), Request(), NO_REGISTRY)
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match="it has neither job.yaml nor config.json"):
        find_subject(str(tmp_path / "empty"), Request(checkpoint="best"), NO_REGISTRY)


def test_a_pretrained_model_has_no_checkpoints_and_needs_data(tmp_path: Path) -> None:
    model = str(model_in(tmp_path / "model"))
    with pytest.raises(JobError, match="is a pretrained model without checkpoints"):
        find_subject(model, Request(checkpoint="3"), NO_REGISTRY)
    with pytest.raises(JobError, match="no data is given"):
        find_subject(model, Request(), NO_REGISTRY)


def entry(key: str, **spec: Any) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(key=key, **spec))


class Entries:
    """Stand-in of a registry."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def entries(self, _kind: str) -> list[Any]:
        return [entry(key) for key in self.keys]


def test_an_evaluated_job_names_adamw_or_else_the_first_optimizer() -> None:
    assert subject._any_optimizer(cast("Registry", Entries("sgd", "adamw", "lion"))) == "adamw"
    assert subject._any_optimizer(cast("Registry", Entries("sgd", "lion"))) == "lion"
    with pytest.raises(JobError, match="no optimizer is installed"):
        subject._any_optimizer(cast("Registry", Entries()))


def test_positions_of_a_language_model_inside_a_larger_one_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = model_in(tmp_path / "model"), written(tmp_path / "some.txt", "text")
    monkeypatch.setattr(subject.Job, "from_values", lambda values, **_: values)
    registry = cast("Registry", Entries("sgd"))
    for inside, length in (({"max_position_embeddings": 64}, 64), ("x", 2048), ({}, 2048)):
        (model / "config.json").write_text(json.dumps({"text_config": inside}))
        found = find_subject(str(model), Request((data,), world_size=1), registry)
        assert cast("dict[str, Any]", found.job)["data"]["sequence_length"] == length


@pytest.mark.parametrize(
    ("positions", "length"), [(None, 2048), (4096, 2048), (1000, 1000), (1003, 1000), (5, 5), (0, 2048), ("x", 2048)]
)
def test_samples_of_a_pretrained_model_have_at_most_its_positions_and_2048(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: object, length: int
) -> None:
    model, data = model_in(tmp_path / "model"), written(tmp_path / "some.txt", "text")
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    given: list[dict[str, Any]] = []
    loaded: list[Any] = []

    def from_values(values: dict[str, Any], **others: Any) -> str:
        given.append(values)
        loaded.append(others)
        return "job"

    monkeypatch.setattr(subject.Job, "from_values", from_values)
    registry = cast("Registry", Entries("sgd"))
    request = Request((data,), overrides=["batch.size=4", "evaluation.sets.some.too_long=drop"], world_size=2)
    found = find_subject(str(model), request, registry)
    assert (found.name, found.job, found.run) == (str(model), "job", False)
    (values,) = given
    dataset = {"name": "documents", "sources": [str(data)], "sequence_length": length}
    assert values["evaluation"]["sets"] == {"some": {**values["data"], "too_long": "drop"}}
    assert {**values["data"], **dataset} == values["data"]
    assert values["batch"] == {"size": 4, "microbatch": 8}
    assert (values["model"], values["optimizer"]) == ({"pretrained": str(model)}, "sgd")
    assert loaded == [{"registry": registry, "world_size": 2}]


@pytest.mark.parametrize(
    ("trained", "checkpoint", "pretrained", "loads", "run"),
    [
        (True, None, None, True, True),
        (False, None, "model", True, False),
        (False, "best", "model", True, None),
        (False, None, "model", False, None),
        (False, None, None, True, None),
        (True, "3", None, True, True),
    ],
)
def test_weights_come_from_a_checkpoint_or_else_from_the_pretrained_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: bool,
    checkpoint: str | None,
    pretrained: str | None,
    loads: bool,
    run: bool | None,
) -> None:
    class Model:
        def __init__(self, pretrained: str | None) -> None:
            self.pretrained = pretrained

    monkeypatch.setattr(subject, "ModelConfig", Model)
    monkeypatch.setattr(subject, "_evaluated", lambda _values, job, _files: job)
    if trained:
        (tmp_path / "step-00000003").mkdir()
    job: Any = SimpleNamespace(
        model=Model(pretrained),
        loading=SimpleNamespace(weights=loads),
        run=SimpleNamespace(directory=tmp_path),
        checkpoint=SimpleNamespace(location=lambda directory: directory),
        resolved=dict,
    )
    if run is None:
        with pytest.raises(JobError) as error:
            subject._of_job("it", job, Request(checkpoint=checkpoint))
        assert ("and the job has no 'model.pretrained'" in str(error.value)) == (checkpoint is None)
        return
    found = subject._of_job("it", job, Request(checkpoint=checkpoint))
    assert (found.run, found.checkpoint) == (run, checkpoint or "newest")
    with pytest.raises(JobError, match="--like has no effect"):
        subject._of_job("it", job, Request(like=tmp_path))


@pytest.mark.parametrize(
    ("sets", "files", "datasets"),
    [
        ("none", False, {"data": "trained"}),
        ({}, False, {"evaluation": "held out"}),
        ({"a": "one", "b": "two"}, False, {"a": "one", "b": "two"}),
        ({"a": "one"}, True, {"x": "of x.txt", "y": "of y.txt"}),
    ],
)
def test_datasets_are_files_or_the_jobs_evaluation_or_its_training_data(
    monkeypatch: pytest.MonkeyPatch, sets: Any, files: bool, datasets: dict[str, str]
) -> None:
    given: list[dict[str, Any]] = []

    class Loaded:
        def use(self, *_: object) -> str:
            return "job"

    def from_values(values: dict[str, Any], **_: object) -> Loaded:
        given.append(values)
        return Loaded()

    monkeypatch.setattr(subject.Job, "from_values", from_values)
    monkeypatch.setattr(subject, "dataset_of", lambda path, _like: f"of {path.name}")
    section = None if sets == "none" else {"sets": sets, "data": "held out", "metrics": ["m", "n"]}
    values = {"data": "trained", "evaluation": section, "metrics": ["n", "o"], "trackers": ["t"], "export": True}
    job: Any = SimpleNamespace(evaluation=section, registry=None, source=None)
    chosen = [Path("x.txt"), Path("y.txt")] if files else []
    subject._evaluated(values, job, chosen)
    assert given[0]["evaluation"] == {
        "every": 1, "packs": "all", "sets": datasets, "metrics": ["n", "o"] if section is None else ["m", "n", "o"],
    }  # fmt: skip
    assert [given[0][name] for name in ("metrics", "trackers", "subscribers", "export")] == [[], [], [], False]
    with pytest.raises(JobError, match="two files are named '.*' without their suffixes"):
        subject._evaluated(values, job, [Path("a/x.txt"), Path("b/x.txt")])
