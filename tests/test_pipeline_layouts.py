"""Pipelines compute what one process does, with every schedule and together with everything else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_core.errors import D9dError
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.logs import read_log_without_times
from d9d_testing.world import World

STALE = "docs/layouts.json has other rows; run tools/layout_table.py pipelines"


@pytest.mark.thorough
def test_each_schedule_on_two_ranks_computes_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    cases = [case for case in table.covering_pipelines() if case.pp == 2 and case.model is table.DEEP_DENSE]
    chosen = {case.schedule: case for case in reversed(cases)}
    assert set(chosen) == set(table.SCHEDULES)
    rows = table.run_pipelines(tmp_path / "corpus", list(chosen.values()), steps=2)
    assert [(count, v.layout, v.diverged) for _, count, v in rows if not v.passed] == []


@pytest.mark.full
def test_pipelines_compute_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    cases = table.covering_pipelines()
    rows = table.run_pipelines(tmp_path / "corpus", cases, steps=2)
    assert [(count, v.layout, v.diverged) for _, count, v in rows if not v.passed] == []
    shown = {layout: counts for counts, layout in _shown(table)}
    missing = [(count, v.layout) for _, count, v in rows if str(count) not in shown.get(v.layout, "").split(", ")]
    assert missing == [], STALE


def test_what_always_runs_has_each_schedule_on_two_ranks_and_on_four_and_each_at_its_least(table: ModuleType) -> None:
    cases = table.covering_pipelines()
    assert {(case.schedule, case.pp) for case in cases} == {(name, pp) for name in table.SCHEDULES for pp in (2, 4)}
    least = {case.schedule for case in cases if case.microbatches == table.counts(case.schedule, case.pp)[0]}
    assert least == set(table.SCHEDULES)
    assert {case.data.name for case in cases} >= {"one process", "replicate 2", "fsdp 2", "fsdp 2, ep 2"}
    assert {case.tied for case in cases} == {True, False}


def train(jobs: list[dict[str, Any]], plugins: list[str]) -> None:
    """Whole runs, one after the other; runs on every rank of a world."""
    for values in jobs:
        job = job_of(values, plugins)
        job.build(lambda _note: None, topology_here(job)).train()


@pytest.mark.thorough
def test_metrics_and_evaluations_of_experts_in_stages_are_those_of_one_process(
    table: ModuleType, tmp_path: Path
) -> None:
    common = table.job(tmp_path / "corpus", "float32", model=table.DEEP_EXPERTS)
    common |= {
        "steps": 2,
        "batch": {"size": 12, "microbatch": 3},
        "metrics": ["router", "perplexity"],
        "logging": {"every": 1},
        "evaluation": {"every": 2, "packs": 1, "data": common["data"]},
        "trackers": [{"name": "jsonl", "picture": False}],
    }
    names = {"whole": {}, "1f1b": {"pipeline": "1f1b"}, "zero_bubble_v": {"pipeline": "zero_bubble_v"}}
    jobs = {
        name: common | {"run": {"name": name, "dir": str(tmp_path / "runs")}, "mesh": {"pp": 2 if how else 1}, **how}
        for name, how in names.items()
    }
    World(1, timeout=60.0).run(train, [jobs.pop("whole")], list(table.PLUGINS))
    World(2, timeout=120.0).run(train, list(jobs.values()), list(table.PLUGINS))
    expected = read_log_without_times(tmp_path / "runs" / "whole")
    assert [line["step"] for line in expected] == [1, 2, 2]
    assert any("router" in key for key in expected[0])
    assert "eval/loss" in expected[2]
    for name in jobs:
        for line, wanted in zip(read_log_without_times(tmp_path / "runs" / name), expected, strict=True):
            assert line == pytest.approx(wanted, rel=2e-5, abs=1e-7)


def built(jobs: list[dict[str, Any]], plugins: list[str]) -> list[str]:
    """Why each job cannot be built, or nothing; runs on every rank of a world."""
    found = []
    for values in jobs:
        job = job_of(values, plugins)
        try:
            job.build(lambda _note: None, topology_here(job))
            found.append("")
        except D9dError as error:
            found.append(str(error))
    return found


@pytest.mark.thorough
def test_a_pattern_may_match_on_one_stage_only_and_one_that_matches_on_none_fails_on_all_ranks(
    table: ModuleType, tmp_path: Path
) -> None:
    def checkpointed(*patterns: str) -> dict[str, Any]:
        return {"parallel": [{"name": "activation_checkpointing", "match": list(patterns)}]}

    def grouped(*patterns: str) -> dict[str, Any]:
        groups = [{"match": pattern, "lr_scale": 0.5} for pattern in patterns]
        return {"optimizer": {"name": "adamw", "lr": 0.1, "groups": groups}}

    common = table.job(tmp_path / "corpus", "float32") | {"batch": {"size": 2, "microbatch": 1}}
    cases = [
        *(checkpointed("layers.0"), checkpointed("layers.1"), checkpointed("layers.0", "layers.9")),
        *(grouped("layers.0.*"), grouped("layers.1.*"), grouped("layers.0.*", "layers.9.*")),
    ]
    jobs = [common | {"mesh": {"pp": 2}, "pipeline": "1f1b", **case} for case in cases]
    with pytest.raises(D9dError) as alone:
        job_of(common | cases[-1], table.PLUGINS).plan()
    for found in World(2, timeout=60.0).run(built, jobs, list(table.PLUGINS)):
        assert [found[place] for place in (0, 1, 3, 4)] == [""] * 4
        assert "the pattern 'layers.9' in 'match' matches no block" in found[2]
        assert found[5] == str(alone.value)


@pytest.mark.slow
def test_all_pipelines_compute_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    rows = table.run_pipelines(tmp_path / "corpus")
    assert len(rows) == 7 * 2 * 3 * 3 + 18
    assert [(count, v.layout, v.diverged) for _, count, v in rows if not v.passed] == []
    assert _shown(table) == [(one["microbatches"], one["layout"]) for one in table.merged(rows)], STALE


@pytest.mark.slow
def test_pipelines_in_bfloat16_compute_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    cases = [case for case in table.covering_pipelines() if case.model is table.DEEP_DENSE]
    rows = table.run_pipelines(tmp_path / "corpus", cases, "bfloat16")
    assert [(count, v.layout, v.diverged) for _, count, v in rows if not v.passed] == []


def _shown(table: ModuleType) -> list[tuple[str, str]]:
    """Numbers of microbatches, and the layout."""
    return [(row["microbatches"], row["layout"]) for row in table.recorded()["pipelines"]]
