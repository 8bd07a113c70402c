"""Files in the directory of a run that say what runs there, and that it is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from d9d_core import events as ev
from d9d_core.errors import JobError
from d9d_core.program.placement import Pipeline
from d9d_core.program.text import parse_programs
from d9d_core.registry.manifest import Manifest
from d9d_core.schedule import single_stage
from d9d_core.subscriber import subscribe
from d9d_engine.job import Job
from d9d_engine.run.directory import (
    FACTS,
    FAILURE,
    JOB,
    KEPT_JOB,
    PROGRAMS,
    STOP,
    TOKENIZER,
    RunFailure,
    clear_ending,
    kept_jobs,
    read_ending,
    read_failure,
    write_ending,
    write_failure,
    write_start,
    write_stop,
)
from d9d_engine.supervision.failure import OtherRankError
from d9d_weights.files import atomic


def test_a_stop_is_recorded_until_the_next_start(tmp_path: Path) -> None:
    write_stop(tmp_path, 5, 9, "SIGTERM")
    assert json.loads((tmp_path / STOP).read_text()) == {"step": 5, "steps": 9, "request": "SIGTERM"}
    clear_ending(tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_stop(tmp_path / "missing", 5, 9, None)  # must not hide that all is saved


def test_a_start_leaves_the_job_and_the_programs_and_undoes_the_ending(job: Callable[..., Job]) -> None:
    made = job()
    directory, manifest = made.run.directory, Manifest.of(made.registry)
    programs = single_stage(1, 3)

    def write_assets(target: Path) -> None:
        (target / "tokenizer.json").write_text("{}")

    write_start(made, manifest, programs, write_assets)
    assert parse_programs((directory / PROGRAMS).read_text()) == list(programs)
    assert (directory / TOKENIZER / "tokenizer.json").read_text() == "{}"
    assert yaml.safe_load((directory / JOB).read_text())["run"]["name"] == made.run.name
    write_ending(directory, 3, 3, None)
    assert read_ending(directory) == {"step": 3, "steps": 3, "reason": None}
    write_start(made, manifest, Pipeline().programs(3), lambda _: None)
    assert not (directory / PROGRAMS).exists(), "there is no pipeline"
    assert not (directory / TOKENIZER).exists(), "the data has no tokenizer"
    assert read_ending(directory) is None


def test_a_run_keeps_each_job_that_trained_it(job: Callable[..., Job]) -> None:
    directory = job().run.directory

    def start(step: int, seed: int) -> list[int]:
        made = job(f"seed={seed}")
        write_start(made, Manifest.of(made.registry), (), lambda _: None, step)
        assert yaml.safe_load((directory / JOB).read_text())["seed"] == seed
        return kept_jobs(directory)

    def seed_from(step: int) -> int:
        seed: int = yaml.safe_load((directory / KEPT_JOB.format(step)).read_text())["seed"]
        return seed

    assert start(0, 1) == []
    assert start(20, 1) == [], "one job has trained all steps"
    assert start(40, 2) == [0, 40]
    assert start(60, 3) == [0, 40, 60]
    assert [seed_from(step) for step in (0, 40, 60)] == [1, 2, 3]
    assert start(50, 2) == [0, 40], "the steps from 50 on are trained again, with the job of the steps before"
    assert start(30, 4) == [0, 30]
    assert [seed_from(step) for step in (0, 30)] == [1, 4]
    assert start(0, 5) == []


def test_a_start_leaves_its_facts_and_undoes_the_failure(job: Callable[..., Job]) -> None:
    made = job()
    directory = made.run.directory
    write_start(made, Manifest.of(made.registry), (), lambda _: None, facts={"parameters": 3})
    assert json.loads((directory / FACTS).read_text()) == {"parameters": 3}
    write_failure(directory, 5, JobError("no room\nhere"))
    assert json.loads((directory / FAILURE).read_text()) == {"step": 5, "error": "no room", "status": 2}
    write_start(made, Manifest.of(made.registry), (), lambda _: None)
    assert read_failure(directory) is None


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError("bad"), "ValueError: bad"), (RuntimeError(), "RuntimeError"), (JobError("x"), "x")]
)
def test_a_failure_is_one_line_that_names_a_foreign_exception(tmp_path: Path, error: Exception, text: str) -> None:
    write_failure(tmp_path, 1, error)
    assert read_failure(tmp_path) == RunFailure(text, 2 if isinstance(error, JobError) else 1)
    write_failure(tmp_path / "missing", 1, error)  # must not hide the error itself


def test_a_damaged_record_of_a_failure_counts_as_missing(tmp_path: Path) -> None:
    for content in ("{", "[]", '{"error": 3}'):
        (tmp_path / FAILURE).write_text(content)
        assert read_failure(tmp_path) is None


def test_a_run_records_the_plugins_and_parameters_of_its_job_only(job: Callable[..., Job]) -> None:
    made = job("steps=1")
    made.build(lambda _note: None).train()
    facts = json.loads((made.run.directory / FACTS).read_text())
    assert facts["device"] == "cpu"
    assert facts["parameters"] >= facts["trained_parameters"] > 0
    parts = [part for found in facts["plugins"].values() for part in found]
    assert "model toy_model" in parts
    assert "optimizer toy_optimizer" in parts
    kinds = [part.split(" ")[0] for part in parts]
    assert kinds.count("model") == kinds.count("task") == 1, "no component that the job does not name"


def test_a_run_that_fails_records_its_error(job: Callable[..., Job]) -> None:
    made = job("steps=4")

    def fail(_event: ev.StepEnds) -> None:
        raise ValueError("the handler is wrong")

    trainer = made.build(lambda _note: None, observers=[subscribe(ev.StepEnds)(fail)])
    with pytest.raises(Exception, match="the handler is wrong"):
        trainer.train()
    failure = read_failure(made.run.directory)
    assert failure is not None
    assert "the handler is wrong" in failure.error


def test_the_first_failure_of_a_start_is_kept_and_an_error_of_the_job_replaces_any(tmp_path: Path) -> None:
    write_failure(tmp_path, 5, RuntimeError("the first"), "rank 1 on b")
    write_failure(tmp_path, 5, RuntimeError("connection closed"))
    assert read_failure(tmp_path) == RunFailure("rank 1 on b: RuntimeError: the first", 1)
    write_failure(tmp_path, 5, OtherRankError("rank 3 on c", "record 7 is damaged", 2))
    write_failure(tmp_path, 5, JobError("late"))
    assert read_failure(tmp_path) == RunFailure("rank 3 on c: record 7 is damaged", 2)


def test_ranks_that_fail_at_the_same_time_leave_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = atomic.create

    def interrupted(path: Path, content: bytes) -> None:
        create(path, content)
        monkeypatch.setattr(atomic, "create", create)
        write_failure(tmp_path, 5, RuntimeError("the other"), rank=1)

    monkeypatch.setattr(atomic, "create", interrupted)
    write_failure(tmp_path, 5, RuntimeError("one"), rank=0)
    failure = read_failure(tmp_path)
    assert failure is not None
    assert failure.error.endswith("one")
    assert [path.name for path in tmp_path.iterdir()] == ["failed.json"]
