"""Sections of a job, saved jobs, and the bounds of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.config import LoadsCode, PathOrAddress, PathText, Section, closest, dotted, speakable
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.job_file import reading
from d9d_core.job_file.evaluation import Evaluation
from d9d_core.job_file.job import Best, Checkpoint, Mesh, Precision, Run
from d9d_core.job_file.reading import read_yaml, write_yaml
from d9d_core.job_file.saved_job import SavedJob, code_mark
from d9d_core.job_file.sections.profiling import Profiling
from d9d_core.registry.registry import Registry
from d9d_testing.toy.config import ToyDataConfig, ToyMetricConfig
from pydantic import BaseModel, TypeAdapter, ValidationError

JOB = {"steps": 3, "model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer"}


def problem(section: type[BaseModel], **fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section.model_validate(fields)
    return str(caught.value.errors()[0]["msg"])


def test_a_profiled_cycle_has_room_for_its_steps() -> None:
    Profiling(every=4, warmup=1, active=3)
    assert problem(Profiling, every=4, warmup=2, active=3) == (
        "Value error, warmup 2 and active 3 are 5 steps, more than the 4 of a cycle; raise every or lower the others"
    )


def test_checkpoints_are_kept_only_if_some_are_removed() -> None:
    Checkpoint(every=2, keep_every=4)
    Checkpoint(keep=None, best={})
    assert "so keep_every has no effect" in problem(Checkpoint, keep=None, every=2, keep_every=4)
    for every in (None, 3):
        assert f"keep_every 4 must be a multiple of every, which is {every}" in problem(
            Checkpoint, every=every, keep_every=4
        )
    assert Checkpoint().location(Path("run")) == Path("run/checkpoints")
    assert Checkpoint(dir="there").location(Path("run")) == Path("there")
    assert Checkpoint(dir="memory://there").location(Path("run")) == "memory://there"


def test_other_sections_refuse_values_without_effect() -> None:
    assert "autocast is for float32 parameters" in problem(Precision, parameters="bfloat16", autocast="bfloat16")
    assert problem(Run, tags=["a", "b", "a"]) == "Value error, duplicate tag 'a'; remove one"
    assert str(Mesh(tp=2, ep=2)) == "tp=2"
    assert str(Mesh(ep=1)) == "one process"
    assert "missing; add 'data:' under 'evaluation'" in problem(Evaluation, every=2)
    data = ToyDataConfig()
    assert "'sets' already names a, b; move 'data' into 'sets'" in problem(
        Evaluation, every=2, sets={"a": data, "b": data}, data=data
    )
    metric = ToyMetricConfig()
    assert "metrics[1] is the same as metrics[0]; remove one" in problem(
        Evaluation, every=2, data=data, metrics=[metric, metric]
    )
    assert Evaluation(every=2, data=data).datasets == {"": data}
    assert list(Evaluation(every=2, sets={"b": data, "a": data}).datasets) == ["b", "a"]


def test_the_export_of_the_best_weights_compares_the_evaluation_loss_unless_the_job_says_otherwise() -> None:
    evaluation = {"every": 2, "data": "toy_data"}
    registry = Registry.of(toy)

    def best(export: object, **checkpoint: Any) -> Best | None:
        values = {**JOB, "export": export, "evaluation": evaluation, "checkpoint": {"every": 2, **checkpoint}}
        return JobFile.from_values(values, registry=registry).checkpoint.best

    assert best("best") == best("best", best=None) == Best(series="eval/loss", mode="min")
    assert best("best", best={"series": "eval/score", "mode": "max"}) == Best(series="eval/score", mode="max")
    assert best(True) is None
    with pytest.raises(JobError, match="checkpoint: input should be a mapping of fields, got 3"):
        JobFile.from_values({**JOB, "export": "best", "checkpoint": 3}, registry=registry)


def test_lists_of_a_job_have_no_part_twice_and_trackers_one_of_each_name(tmp_path: Path) -> None:
    registry = Registry.of(toy)
    twice = {"name": "toy_tracker", "fails_in": "write"}
    with pytest.raises(JobError, match=r"trackers\[1\] is 'toy_tracker' like trackers\[0\]: both would write"):
        JobFile.from_values({**JOB, "trackers": ["toy_tracker", twice]}, registry=registry)
    with pytest.raises(JobError, match=r"metrics\[1\] is the same as metrics\[0\]; remove one"):
        JobFile.from_values({**JOB, "metrics": ["toy_metric", "toy_metric"]}, registry=registry)
    made = JobFile.from_values({**JOB, "batch": {"size": 12, "microbatch": 4}}, registry=registry)
    assert (made.microbatch_size, made.microbatches) == (4, 3)
    whole = JobFile.from_values({**JOB, "batch": {"size": 12}}, registry=registry)
    assert (whole.microbatch_size, whole.microbatches) == (12, 1)


class Values(Section):
    path: Path = Path()
    number: int = 0
    share: float = 0.0
    free: dict[str, Any] = {}
    many: list[Path] = []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"number": True}, "input should be a number"),
        ({"share": False}, "input should be a number"),
        ({"number": 2**63}, f"a whole number has at most 64 bits, up to {2**63 - 1}"),
        ({"number": -(2**63)}, f"a whole number has at most 64 bits, up to {2**63 - 1}"),
        ({"free": {"x": float("inf")}}, "input should be a finite number"),
        ({"path": "s3://there"}, "address"),
        ({"many": ["a", "s3://there"]}, "address"),
    ],
)
def test_values_that_no_part_of_d9d_could_use_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Values.model_validate(values)
    (line,) = caught.value.errors()
    assert said in line["msg"]


def test_values_at_the_limits_are_accepted() -> None:
    found = Values.model_validate({"number": 2**63 - 1, "free": {"x": [1.5, True]}, "many": ["a", "b"]})
    assert (found.number, found.free, found.many) == (2**63 - 1, {"x": [1.5, True]}, [Path("a"), Path("b")])


def test_texts_of_paths_and_addresses() -> None:
    path, address = TypeAdapter(PathText), TypeAdapter(PathOrAddress)
    assert (path.validate_python("a/b"), address.validate_python("a/b")) == ("a/b", "a/b")
    assert address.validate_python("memory://x") == "memory://x"
    for text in ("zip://a::memory://x", "simplecache::memory://x", "unheard::memory://x"):
        assert address.validate_python(text) == text
    with pytest.raises(ValidationError):
        path.validate_python("memory://x")
    with pytest.raises(ValidationError, match="no driver for addresses of 'memry://'; did you mean 'memory://'"):
        address.validate_python("memry://x")
    assert dotted(("a", 0, "b", "c")) == "a[0].b.c"
    assert (closest("trian", ["train", "check"]), closest("x", ["train"])) == ("train", None)
    assert speakable({"a": [float("inf"), 1.0], "b": float("nan")}) == {"a": ["inf", 1.0], "b": "nan"}


def test_as_many_values_as_allowed_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading.MAX_VALUES == 100_000
    monkeypatch.setattr(reading, "MAX_VALUES", 4)
    assert read_yaml("[1, 2, 3]", "job")[0] == [1, 2, 3]
    with pytest.raises(JobError, match="more than 4 values"):
        read_yaml("[1, 2, 3, 4]", "job")


def test_texts_like_numbers_are_quoted() -> None:
    values = {"a": "3e-4", "b": "yes", "c": "1_0", "d": "text", "e": 3e-4}
    assert read_yaml(write_yaml(values), "job")[0] == values
    assert "d: text\n" in write_yaml(values)


# --- saved jobs -------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, text: str, *files: Path) -> SavedJob:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return SavedJob(path, "d9d x --like job.yaml", files)


def test_a_saved_job_is_read_without_parts_that_only_a_run_needs(tmp_path: Path) -> None:
    text = "seed: 3\ntrackers: [s3://x]\nsubscribers: [a]\nlr_schedule: b\nprofiling: {}\nrun: {description: 'a://b'}\n"
    document = saved(tmp_path, text).read(["seed=4", "model.pretrained=s3://given"])
    assert document.values == {
        "seed": 4, "run": {"description": "a://b"}, "model": {"pretrained": "s3://given"},
    }  # fmt: skip


def test_a_saved_job_that_would_run_code_or_open_addresses_is_refused(tmp_path: Path) -> None:
    text = f"plugins:\n  files: [mine.py, other.py]\nmodel:\n  pretrained: s3://{'x' * 80}\ndata: [a, {{b: c://d}}]\n"
    job = saved(tmp_path, text, tmp_path / "other.py")
    with pytest.raises(JobError) as caught:
        job.read()
    path = job.path
    cut = repr("s3://" + "x" * 80)[:57] + "..."
    assert str(caught.value).splitlines() == [
        f"{path}:2: plugins.files[0] names a plugin file, 'mine.py'",
        f"{path}:4: model.pretrained is an address, {cut}",
        f"{path}:5: data[1].b is an address, 'c://d'",
        "a job file found in a directory runs no code and opens no address; "
        f"read {path}, and if you trust it, name it: d9d x --like job.yaml",
    ]
    with pytest.raises(JobError, match=r"plugins\[0\] names a plugin file, 'mine.py'"):
        saved(tmp_path, "plugins: [mine.py]").read()
    with pytest.raises(JobError, match="plugins.* names a plugin file, 'mine.py'"):
        saved(tmp_path, "plugins: mine.py").read()


class Imports(Section):
    build: Annotated[str, LoadsCode(lambda text: ":" in text)] = ""
    inner: list[Annotated[str, LoadsCode()]] = []
    more: dict[str, Annotated[str, LoadsCode()]] = {}
    plain: str = "a:b"


def test_fields_that_import_code_are_refused_unless_the_command_line_set_them(tmp_path: Path) -> None:
    job = saved(tmp_path, "x: 1\n")
    found: Any = Imports(build="a:b", inner=["c"], more={"k": "d"})
    with pytest.raises(JobError) as caught:
        job.check(found, job.read())
    assert [line.partition(": ")[2] for line in str(caught.value).splitlines()[:3]] == [
        "build names code to import, 'a:b'",
        "inner[0] names code to import, 'c'",
        "more.k names code to import, 'd'",
    ]
    harmless: Any = Imports(build="nothing")
    job.check(harmless, job.read())
    job.check(found, job.read(["build=a:b", "inner=[c]", "more={k: d}"]))
    assert code_mark((int, list[str])) is None
