"""``d9d pipeline`` on schedules, job files and plugins of others."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import BuildError, JobError, PluginError
from d9d_pipeline.cli import selection
from d9d_pipeline.cli.commands import app
from typer.testing import CliRunner

OURS = {"gpipe", "looped_bfs", "1f1b", "interleaved_1f1b", "zb1p", "zero_bubble_v", "dual_pipe_v"}

#: A schedule that forgets a backward, or whose ranks wait for one another.
PLUGIN = '''
from collections.abc import Iterator
from typing import Literal
from d9d_core.config import PluginConfig
from d9d_core.program.text import parse_programs
from d9d_core.plugin import Ref, ScheduleSpec, hookimpl

class Config(PluginConfig):
    """A schedule with a fault."""
    name: Literal["faulty"] = "faulty"
    """Selects it."""
    waits: bool = False
    """Deadlock."""

def build(config):
    first = "F0.0 S>0.0 F0.1 S>0.1 R<0.0 B0.0 R<0.1 B0.1 R0"
    second = "R>1.0 F1.0 R>1.1 B1.0 S<1.0 F1.1 B1.1 S<1.1 R1"
    if config.waits:
        first = "F0.0 S>0.0 R<0.0 F0.1 B0.0 S>0.1 R<0.1 B0.1 R0"
        second = "R>1.0 F1.0 R>1.1 F1.1 B1.0 S<1.0 B1.1 S<1.1 R1"
    else:
        first = first.replace("B0.1", "")
    return lambda ranks, microbatches: parse_programs(first + "\\n" + second)

@hookimpl
def d9d_schedules() -> Iterator[ScheduleSpec]:
    ref = lambda name: Ref(f"{__name__}:{name}")
    yield ScheduleSpec(name="faulty", summary="Faulty.", config=ref("Config"), build=ref("build"))
'''


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("D9D_PLUGINS", raising=False)
    return tmp_path


@pytest.mark.thorough
def test_show_prints_a_table_and_draws_the_timeline(here: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' of d9d-engine")
    text = run("show", "1f1b", "--pp", "4", "--microbatches", "8", "--costs", "t=0.1")
    assert "1f1b: step of 8 microbatches on 4 ranks" in text
    assert "timeline in 1f1b-step-pp4-mb8.svg" in text
    assert "holds     at most 4 microbatches" in text
    assert (here / "1f1b-step-pp4-mb8.svg").read_text().rstrip().endswith("</svg>")


def test_without_matplotlib_show_prints_the_table_and_says_what_to_install(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    asked = ("show", "1f1b", "--pp", "2", "--microbatches", "2")
    text = run(*asked)
    assert "holds     at most 2 microbatches" in text
    assert re.search(r"^no timeline: pictures need matplotlib.*pip install 'd9d-engine\[plots\]'$", text, re.MULTILINE)
    assert json.loads(run(*asked, "--json"))["picture"] is None
    with pytest.raises(PluginError, match=r"install it with: pip install 'd9d-engine\[plots\]'"):
        run(*asked, "--picture", "here.svg")
    assert list(here.iterdir()) == []


def test_show_prints_json_with_the_critical_path(here: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' of d9d-engine")
    found = json.loads(run("show", "zb1p", "--pp", "2", "--microbatches", "4", "--json", "--picture", "here.svg"))
    assert found["schedule"] == "zb1p"
    assert found["picture"] == "here.svg"
    assert found["time"] == 13
    assert found["peak_live"] == [2, 2]
    assert found["critical_path"][0] == "F0.0"
    assert (here / "here.svg").exists()


def test_show_prints_programs_without_drawing(here: Path) -> None:
    text = run("show", "gpipe", "--pp", "1", "--microbatches", "2", "--program")
    assert text == "F0.0 F0.1 B0.0 B0.1 R0\n"
    assert list(here.iterdir()) == []


def test_a_schedule_is_shown_on_8_ranks_with_32_microbatches_unless_sizes_are_given() -> None:
    ranks = run("show", "gpipe", "--program").splitlines()
    assert len(ranks) == 8
    assert ranks[7].count(" F7.") == 32
    assert run("show", "gpipe", "--pp", "1", "--program").count("B0.") == 32
    assert len(run("show", "gpipe", "--microbatches", "1", "--program").splitlines()) == 8


def test_show_takes_fields_of_the_schedule() -> None:
    arguments = ("show", "zb1p", "--pp", "2", "--microbatches", "4", "--set", "stages_per_rank=3", "--program")
    assert "F5.0" in run(*arguments)
    with pytest.raises(JobError, match=r"schedule zb1p: stages: not a field of 'zb1p'.*give fields with --set"):
        run("show", "zb1p", "--set", "stages=3")
    with pytest.raises(JobError, match="--set stages_per_rank: write FIELD=VALUE"):
        run("show", "zb1p", "--set", "stages_per_rank")


def test_show_draws_evaluations_of_the_same_placement() -> None:
    text = run("show", "zero_bubble_v", "--pp", "2", "--microbatches", "2", "--inference", "--program")
    assert text.splitlines()[1] == "R>1.0 R>1.1 F1.0 F1.1 F2.0 S>2.0 F2.1 S>2.1"
    assert "B" not in text
    assert "inference of 2 microbatches on 2 ranks" in run(
        "show", "1f1b", "--pp", "2", "--microbatches", "2", "--inference"
    )


@pytest.mark.thorough
def test_show_shortens_the_table_of_a_long_pipeline() -> None:
    text = run("show", "1f1b", "--pp", "64", "--microbatches", "2")
    assert [line.strip() for line in text.splitlines()].count("...") == 1
    assert "\n   63" in text
    assert "\n   32" not in text


@pytest.mark.thorough
def test_show_reads_a_job_file(here: Path) -> None:
    job = {
        "plugins": [],
        "mesh": {"pp": 4},
        "batch": {"size": 24, "microbatch": 2},
        "pipeline": {"name": "interleaved_1f1b", "stages_per_rank": 3},
        "model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer", "steps": 1,
    }  # fmt: skip
    Path("toys.py").write_text("from d9d_testing.toy.plugin import *\n")
    (here / "job.json").write_text(json.dumps(job))
    text = run("show", "job.json", "--plugin", "toys.py")
    assert "interleaved_1f1b: step of 12 microbatches on 4 ranks" in text
    assert "0, 4, 8" in text
    (here / "job.json").write_text(json.dumps({**job, "pipeline": None, "mesh": {}}))
    with pytest.raises(JobError, match="job.json names no schedule; add 'pipeline: 1f1b'"):
        run("show", "job.json", "--plugin", "toys.py")


def test_without_a_command_the_help_is_shown() -> None:
    result = CliRunner().invoke(app, [])
    assert "Show a pipeline schedule, and compare schedules, without a GPU." in result.output
    assert {"show", "compare"} <= set(result.output.split())
    assert "--install-completion" not in result.output


def test_what_does_not_exist_is_said() -> None:
    with pytest.raises(PluginError, match="unknown schedule '1f2b'"):
        run("show", "1f2b")
    with pytest.raises(JobError, match="--costs: 'x' in 'x=1' is unknown"):
        run("show", "1f1b", "--costs", "x=1")
    with pytest.raises(
        JobError, match=r"dual_pipe_v: 8 microbatch\(es\) are too few for 8 pipeline rank\(s\); at least 16"
    ):
        run("show", "dual_pipe_v", "--microbatches", "8")


def test_a_faulty_plugin_is_found_before_anything_runs(here: Path) -> None:
    (here / "faulty.py").write_text(PLUGIN)
    show = ("show", "faulty", "--plugin", "faulty.py", "--pp", "2", "--microbatches", "2")
    with pytest.raises(BuildError, match=r"invalid programs: B0\.1 missing on rank 0"):
        run(*show)
    with pytest.raises(
        BuildError, match=r"deadlock: rank 0 at B0\.0 waits for S<1\.0 on rank 1; rank 1 at F1\.1 waits"
    ):
        run(*show, "--set", "waits=true")


def test_compare_ranks_all_schedules_by_time_and_marks_what_does_not_fit(here: Path) -> None:
    rows = json.loads(run("compare", "--pp", "8", "--microbatches", "32", "--memory", "9", "--json"))
    ours = [row for row in rows if row["schedule"] in OURS]
    assert {row["schedule"] for row in ours} == OURS
    fitting = [row for row in ours if not row["note"]]
    # Two take equally long; the smaller one comes first.
    assert [row["schedule"] for row in fitting] == ["zero_bubble_v", "zb1p", "dual_pipe_v", "1f1b"]
    assert all(max(row["peak_live"]) <= 9 for row in fitting)
    assert {row["schedule"]: row["note"] for row in ours if row["note"]} == dict.fromkeys(
        ("gpipe", "looped_bfs", "interleaved_1f1b"), "over the memory limit"
    )
    assert list(here.iterdir()) == []


def test_compare_says_why_a_schedule_is_not_in_it(here: Path) -> None:
    (here / "faulty.py").write_text(PLUGIN)
    text = run("compare", "--pp", "2", "--microbatches", "2", "--plugin", "faulty.py")
    assert "dual_pipe_v: 2 microbatch(es) are too few for 2 pipeline rank(s); at least 4" in text
    assert "B0.1 missing on rank 0" in text
    assert text.splitlines()[2].split()[0] == "1"


def test_compare_refuses_costs_that_mean_nothing() -> None:
    with pytest.raises(JobError, match="--costs: 'x'"):
        run("compare", "--pp", "2", "--microbatches", "2", "--costs", "x=1")


def test_a_schedule_that_cannot_be_built_is_an_error_of_its_plugin(here: Path) -> None:
    (here / "faulty.py").write_text(
        PLUGIN.replace("    if config.waits:", "    [][config.waits]\n    if config.waits:")
    )
    with pytest.raises(PluginError, match=r"schedule 'faulty' \(faulty.py\): \w+:build failed: IndexError\("):
        run("show", "faulty", "--plugin", "faulty.py")
    config: Any = None
    entry: Any = type("Entry", (), {"spec": 7, "__str__": lambda _self: "'odd' (here)"})()
    with pytest.raises(PluginError, match=r"^schedule 'odd' \(here\) is declared with a int; it takes a ScheduleSpec$"):
        selection._build(entry, config)
