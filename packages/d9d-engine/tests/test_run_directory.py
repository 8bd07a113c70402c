"""Files in the directory of a run that say what runs there, and that it is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml
from d9d_core.program.placement import Pipeline
from d9d_core.program.text import parse_programs
from d9d_core.registry.manifest import Manifest
from d9d_core.schedule import single_stage
from d9d_engine.job import Job
from d9d_engine.run.directory import (
    JOB,
    KEPT_JOB,
    PROGRAMS,
    TOKENIZER,
    kept_jobs,
    read_ending,
    write_ending,
    write_start,
)


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
