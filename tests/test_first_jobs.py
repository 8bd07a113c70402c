"""The comparison of five jobs in five tools: its page, its scripts, and d9d's own jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("records", "first_jobs_data", "first_jobs")


def test_the_page_has_the_numbers_of_the_file(room: SimpleNamespace) -> None:
    bench = room.first_jobs
    page = bench.PAGE.read_text("utf-8")
    results = room.records.read(room.records.BENCHMARKS, bench.KIND)
    assert len(results) == 1
    assert room.records.fill(page, bench.text_of(results), bench.MARKS) == page
    assert len(page.splitlines()) <= 90


def test_each_measured_job_has_scripts_and_each_script_a_measurement(room: SimpleNamespace) -> None:
    bench = room.first_jobs
    (result,) = room.records.read(room.records.BENCHMARKS, bench.KIND)
    for tool in bench.TOOLS:
        written = {job for job in bench.JOBS if bench.scripts(tool, job)}
        assert written
        if tool not in bench.NEEDS_GPU:
            assert written == set(result[bench.KIND][tool])
    assert {job for job in bench.JOBS if bench.scripts("d9d", job)} == set(bench.JOBS)


def test_comments_and_empty_lines_are_not_counted(room: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "tool" / "sft").mkdir(parents=True)
    (tmp_path / "tool" / "sft.yaml").write_text("# why\n\na: 1 # because\n  # more\nb: 2\n")
    (tmp_path / "tool" / "sft" / "config.json").write_text("{}\n")
    room.first_jobs.SCRIPTS = tmp_path
    assert room.first_jobs.lines_of("tool", "sft") == 3
    assert room.first_jobs.lines_of("tool", "dpo") == 0


@pytest.mark.parametrize(
    "output", ["step 60/60  eval/loss 3.169", "{'eval_loss': '3.169'}", "│  eval_loss   │  3.169  │"]
)
def test_the_loss_is_found_in_the_output_of_each_tool(room: SimpleNamespace, output: str) -> None:
    assert room.first_jobs.LOSS.findall(f"eval_loss: 9.0\n{output}\n")[-1] == "3.169"


@pytest.mark.tools
def test_d9d_checks_its_jobs_without_errors(room: SimpleNamespace, tmp_path: Path) -> None:
    d9d = Path(sys.executable).with_name("d9d")
    data = tmp_path / "data"
    room.first_jobs_data.prepare(data, d9d, room.first_jobs.SCRIPTS / "d9d" / "pretrain.yaml")
    labelled = (data / "kinds.held_out.jsonl").read_text("utf-8").splitlines()
    assert {json.loads(line)["label"] for line in labelled} == {0, 1, 2}
    for job in room.first_jobs.JOBS:
        (file,) = room.first_jobs.scripts("d9d", job)
        (data / file.name).write_bytes(file.read_bytes())
        done = subprocess.run([d9d, "check", file.name], cwd=data, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
