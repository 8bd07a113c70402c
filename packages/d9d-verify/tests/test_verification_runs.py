"""Runs of a verification: their layouts, causes of failures, settings, the command line, and correct runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import JobError
from d9d_engine.job import Job
from d9d_verify import run, worker
from d9d_verify.command import app, verify_job
from d9d_verify.compare import Verdict
from d9d_verify.layouts import REFERENCE_LAYOUT, Layout, layout_values, own_layout, parse_layout
from d9d_verify.measurement import Measurement
from d9d_verify.run import _job, _settings, launch_processes, narrowest_dtype
from typer.testing import CliRunner


def job(mesh: dict[str, int], *strategies: dict[str, Any]) -> Job:
    """Stand-in of a job: mesh and strategies."""

    class Mesh:
        def sizes(self) -> dict[str, int]:
            return dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1) | mesh

        def __str__(self) -> str:
            return "the mesh"

    registry = SimpleNamespace(entries=lambda _kind: [])
    entries = [SimpleNamespace(selector=s["name"], model_dump=lambda mode, s=s: s) for s in strategies]
    return cast("Job", SimpleNamespace(mesh=Mesh(), parallel=entries, pipeline=None, registry=registry))


@pytest.mark.parametrize("as_json", [False, True])
def test_one_layout_that_fails_fails_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    none = (0.0, "a")
    verdicts = [Verdict("x", 0.0, 0.0, none, none, none, None), Verdict.failure("pp=2", "no port")]

    def verify(_job: object, _layouts: object, _steps: int, note: Any) -> list[Verdict]:
        note("pp=2: 2 processes\x1b[2J")
        return verdicts

    monkeypatch.setattr("d9d_verify.run.verify", verify)
    assert not verify_job(job({"pp": 2}), ["pp=2"], 1, 8, as_json)
    written = capsys.readouterr()
    assert "pp=2: 2 processes" in written.err
    assert "\x1b" not in written.err
    assert as_json == written.out.startswith("[\n {")
    assert as_json != ("FAIL" in written.out)
    del verdicts[1]
    assert verify_job(job({"pp": 2}), ["pp=2"], 1, 8, as_json)


def test_the_own_layout_of_a_job_has_at_most_two_ranks_on_each_axis() -> None:
    layout = own_layout(job({"pp": 4, "dp_shard": 2}, {"name": "fsdp", "x": 1}, {"name": "compile"}), 4)
    assert layout.mesh == {"pp": 2, "dp_shard": 2}
    assert layout.name == "pp=2 x dp_shard=2 fsdp, compile"
    assert list(layout.parallel) == [{"name": "fsdp", "x": 1}, {"name": "compile"}]
    assert (layout.ranks, layout.data_parallel_size) == (4, 2)
    assert own_layout(job({}), 1).name == "one process"
    with pytest.raises(JobError, match="the mesh needs at least 8 processes, more than the 7 that are allowed"):
        own_layout(job({"pp": 2, "dp_shard": 2, "tp": 2}), 7)


def test_a_layout_is_read_with_the_jobs_settings_of_its_strategies() -> None:
    own = job({"dp_shard": 8}, {"name": "fsdp", "x": 1})
    layout = parse_layout(" dp_replicate=2 , dp_shard=3: fsdp ,compile,", own)
    assert layout.mesh == {"dp_replicate": 2, "dp_shard": 3}
    assert list(layout.parallel) == [{"name": "fsdp", "x": 1}, {"name": "compile"}]
    assert (layout.ranks, layout.data_parallel_size) == (6, 6)
    assert Layout("x", {"dp_shard": 4, "tp": 3, "ep": 2}, []).ranks == 12  # ep needs no ranks of its own
    assert (parse_layout(":fsdp", own).mesh, parse_layout("pp=1", own).parallel) == ({}, [])


@pytest.mark.parametrize("text", ["dp=2", "dp_shard", "dp_shard=0", "dp_shard=-1", "dp_shard=x", "pp=2,tp:fsdp"])
def test_a_malformed_layout_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="write axis=size"):
        parse_layout(text, job({}))


def test_a_layout_of_stages_may_name_one_schedule_of_those_installed() -> None:
    own = job({"pp": 2}, {"name": "fsdp", "x": 1})
    schedules = [SimpleNamespace(spec=SimpleNamespace(key=name)) for name in ("1f1b", "gpipe")]
    known: Any = own
    known.registry = SimpleNamespace(entries=lambda kind: {"schedule": schedules}[kind])
    known.pipeline = SimpleNamespace(selector="gpipe", model_dump=lambda mode: {"name": "gpipe", "mode": mode})
    found = parse_layout("pp=2:1f1b(x=[1, {y: 2}], z = 3),fsdp", own)
    assert (found.pipeline, list(found.parallel)) == (
        {"name": "1f1b", "x": [1, {"y": 2}], "z": 3}, [{"name": "fsdp", "x": 1}],
    )  # fmt: skip
    assert parse_layout("pp=2:gpipe", own).pipeline == {"name": "gpipe", "mode": "json"}
    assert parse_layout("pp=2:fsdp", own).pipeline is None
    values = {"pipeline": {"name": "gpipe"}}
    assert layout_values(values, found, [])["pipeline"] == {"name": "1f1b", "x": [1, {"y": 2}], "z": 3}
    for text in ("pp=2:1f1b,gpipe", "pp=1:1f1b", "dp_shard=2:1f1b"):
        with pytest.raises(JobError, match=f"^--layout {text}: name at most one schedule, and only with pp=2 or more$"):
            parse_layout(text, own)
    for text in ("fsdp(x", "fsdp(x)", "fsdp(=1)", "fsdp(x=1,y)"):
        with pytest.raises(JobError) as error:
            parse_layout(f"pp=2:{text}", own)
        assert str(error.value) == f"--layout pp=2:{text}: write fields as name(field=value,...), not {text}"


def test_only_layouts_with_stages_keep_the_pipeline_and_only_the_reference_has_reference_kernels() -> None:
    values = {"mesh": {"tp": 8}, "parallel": ["fsdp"], "pipeline": {"name": "1f1b"}, "kernels": {"rope": "triton"}}
    flat = layout_values(values, Layout("x", {"dp_shard": 2}, ["hsdp"]), ["rope", "swiglu"])
    assert flat == {"mesh": {"dp_shard": 2}, "parallel": ["hsdp"], "pipeline": None, "kernels": {"rope": "triton"}}
    assert layout_values(values, Layout("x", {"pp": 2}, []), [])["pipeline"] == {"name": "1f1b"}
    reference = layout_values(values, REFERENCE_LAYOUT, ["rope", "swiglu"])
    assert (reference["mesh"], reference["kernels"].keys()) == ({}, {"rope", "swiglu"})
    assert set(reference["kernels"].values()) != {"triton"}


@pytest.mark.parametrize(
    ("cause", "failure", "output", "said"),
    [
        ("rank 1 was killed by SIGKILL", "late", "text", "rank 1 was killed by SIGKILL"),
        ("rank 0 ended", "the cause\nand what to do\n", "text", "the cause\nand what to do"),
        ("rank 0 ended", None, "some\nlast line\n\n", "last line"),
        ("rank 0 ended", None, " \n", "rank 0 ended"),
        (None, None, "text", None),
    ],
)
def test_the_cause_of_a_failed_layout_is_its_first_error_or_its_last_line_of_output(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: str | None,
    failure: str | None,
    output: str,
    said: str | None,
) -> None:
    seen: dict[str, Any] = {}

    def run_module(module: str, words: list[str], ranks: int, environ: dict[str, str], file: Any) -> Any:
        seen.update(module=module, words=words, ranks=ranks, environ=environ)
        file.write(output)
        if failure is not None:
            (tmp_path / "failure.txt").write_text(failure)
        return None if cause is None else SimpleNamespace(text=cause)

    monkeypatch.setattr("d9d_verify.run.run_module", run_module)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OTHER", "kept")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch_processes(tmp_path, 2) == said
    assert (seen["module"], seen["words"], seen["ranks"]) == ("d9d_verify.worker", [str(tmp_path)], 2)
    assert "RANK" not in seen["environ"]
    assert (seen["environ"]["OTHER"], seen["environ"]["OMP_NUM_THREADS"]) == ("kept", "1")


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_failure_names_the_line_that_raised_it_or_called_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_torch: bool
) -> None:
    def fails(*_: object) -> None:
        torch.ones(2).view(3) if by_torch else {}["x"]

    monkeypatch.setattr(worker.Job, "load", fails)
    with pytest.raises((KeyError, RuntimeError)):
        worker.main(tmp_path)
    text = (tmp_path / "failure.txt").read_text()
    line = fails.__code__.co_firstlineno + 1
    assert text.startswith("RuntimeError: shape" if by_torch else "KeyError: 'x'")
    assert text.endswith(f" ({__file__}:{line}, in fails)")


def test_a_failure_of_torch_alone_names_its_last_line(tmp_path: Path) -> None:
    code = "def a():\n    b()\ndef b():\n    c()\ndef c():\n    raise ValueError\na()"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - it has no text
        exec(compile(code, str(tmp_path / "torch" / "x.py"), "exec"), {})
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test
    assert worker._place(error) == f"{tmp_path / 'torch' / 'x.py'}:6, in c"


@pytest.mark.parametrize(
    ("precision", "parallel", "dtype"),
    [
        ({"autocast": "bfloat16"}, [], torch.bfloat16),
        ({"autocast": None}, [{"name": "fsdp", "reduce": "bfloat16"}], torch.bfloat16),
        ({"autocast": None}, [{"name": "fsdp"}], torch.float32),
    ],
)
def test_bfloat16_anywhere_is_the_narrowest_dtype(precision: Any, parallel: Any, dtype: torch.dtype) -> None:
    assert narrowest_dtype({"precision": precision, "parallel": parallel}) == dtype


def test_a_measured_job_writes_below_its_directory_and_reads_the_users_cache(tmp_path: Path) -> None:
    (tmp_path / "user" / ".cache").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    values = {"run": {"dir": str(tmp_path / "user"), "name": "x"}, "checkpoint": {"every": 2}, "steps": 3}
    found = _job(values, tmp_path / "mine")
    assert found == {
        "run": {"dir": str(tmp_path / "mine" / "runs"), "name": "x"},
        "checkpoint": {"every": 2, "dir": str(tmp_path / "mine" / "checkpoints")},
        "steps": 3,
    }
    assert (tmp_path / "mine" / "runs" / ".cache").resolve() == tmp_path / "user" / ".cache"
    (tmp_path / "other").mkdir()
    _job(values | {"run": {"dir": str(tmp_path / "none")}}, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_the_settings_of_a_measurement_are_told(tmp_path: Path) -> None:
    settings = {"rate": {"factor": 2.5, "first": 9}, "max_norm": None}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    assert _settings(tmp_path, 1) == (
        "the job does not clip; learning rate x 2.5 from step 10 of the schedule, so that updates show"
    )
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"max_norm": 0.5}))
    assert _settings(tmp_path, 2) == (
        "gradients clipped to a norm of 0.5; learning rate x 2.5 from step 10 of the schedule, so that updates show, "
        "one save and one resume across layouts"
    )


def test_the_command_checks_four_steps_of_the_jobs_own_layout_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[tuple[Any, ...]] = []
    passed = [True, False, True]

    def verified(*given: Any) -> bool:
        called.append(given)
        return passed[len(called) - 1]

    monkeypatch.setattr("d9d_verify.command.load_job", lambda *given: given)
    monkeypatch.setattr("d9d_verify.command.verify_job", verified)
    path = tmp_path / "job.yaml"
    path.write_text("")
    runner, text = CliRunner(), str(path)
    assert runner.invoke(app, [text]).exit_code == 0
    assert runner.invoke(app, [text]).exit_code == 1
    options = ["--layout", "pp=2", "--steps", "1", "--max-ranks", "1", "--json", "--set", "seed=1", "--strict-plugins"]
    assert runner.invoke(app, [text, *options]).exit_code == 0
    assert runner.invoke(app, [text, "--steps", "0"]).exit_code == 2
    assert runner.invoke(app, [text, "--max-ranks", "0"]).exit_code == 2
    assert called == [
        ((Job, path, [], [], False, False), [], 4, 8, False),
        ((Job, path, [], [], False, False), [], 4, 8, False),
        ((Job, path, ["seed=1"], [], False, True), ["pp=2"], 1, 1, True),
    ]


def test_a_jobs_own_layout_is_verified_with_at_most_the_given_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def verify(own: Job, layouts: list[Layout], steps: int, _note: object) -> list[Verdict]:
        given.append((own, [dict(layout.mesh) for layout in layouts], steps))
        return []

    monkeypatch.setattr("d9d_verify.run.verify", verify)
    own = job({"pp": 4})
    assert verify_job(own, [], 3, 2, as_json=True)
    assert given == [(own, [{"pp": 2}], 3)]
    with pytest.raises(JobError, match="--max-ranks"):
        verify_job(own, [], 3, 1, as_json=True)


@pytest.mark.parametrize(
    ("own", "layout", "routes", "expected"),
    [
        ("float32", "float32", True, 2),
        ("bfloat16", "bfloat16", False, 2),
        ("bfloat16", "bfloat16", True, 4),
        ("float32", "bfloat16", False, 3),
        ("float32", "bfloat16", True, 5),
    ],
)
def test_there_are_more_correct_runs_where_rounding_moves_tokens_between_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, layout: str, routes: bool, expected: int
) -> None:
    def values_of(values: Any, chosen: Layout, _ops: Any) -> dict[str, Any]:
        dtype = own if chosen is REFERENCE_LAYOUT else layout
        return {**values, "precision": {"parameters": own}, "parallel": [{"name": "fsdp", "compute_dtype": dtype}]}

    numbers = {f"{step}/{name}": 2.0 for step in range(2) for name in ("loss", "tokens", "grad_norm", "lr")}
    tensors = {f"{step}/{name}": torch.ones(2) for step in range(2) for name in ("gradients/a", "model/a")}
    measured, counts = Measurement(numbers, {"start/model/a": torch.zeros(2), **tensors}), list[int]()
    monkeypatch.setattr(run, "layout_values", values_of)
    monkeypatch.setattr(run, "read_all", lambda *_: measured)
    monkeypatch.setattr(run, "_run", lambda *_, sound: counts.append(sound) or measured)
    values = {"run": {"dir": str(tmp_path)}, "checkpoint": {}, "kernels": {"rope": "x"}}
    layouts = [Layout("x", {"dp_shard": 2}, ["fsdp"])]
    _, sound = run._reference(values, [], layouts, 2, tmp_path / "r", lambda *_: None, routes=routes)
    assert (len(sound), counts) == (expected, [expected])
    variants = [json.loads((tmp_path / "r" / f"sound-{index}.json").read_text()) for index in range(expected)]
    if layout != own:  # further variants compute in the narrow dtype, too
        assert {variant["precision"].get("autocast") for variant in variants[2:]} == {"bfloat16"}
