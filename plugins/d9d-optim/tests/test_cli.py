"""Command ``d9d lr show``."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import JobError, PluginError
from d9d_optim.cli import commands
from d9d_optim.cli.commands import app
from d9d_optim.cli.picture import svg_plot, text_plot
from typer.testing import CliRunner

JOB = """
steps: 10
batch: {size: 1}
model:
  {name: qwen3, vocab_size: 8, hidden_size: 8, intermediate_size: 8, num_layers: 1, max_positions: 8,
   num_attention_heads: 1, num_key_value_heads: 1}
task: causal_lm
data: {name: text, sources: [nothing], sequence_length: 8}
optimizer: {name: adamw, lr: 0.5}
lr_schedule: {name: linear, warmup_steps: 2}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("d9d_qwen3")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_it_draws_in_the_terminal_and_writes_a_picture(job: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(job)], catch_exceptions=False)
    assert "linear, 10 steps" in result.output
    assert "first 0.25, highest 0.5 in step 1, last 0" in result.output
    assert ET.fromstring(Path("job-lr.svg").read_text("utf-8")).tag.endswith("svg")


def test_it_prints_the_rate_of_each_step_as_json(job: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(job), "--json", "--steps", "4"], catch_exceptions=False)
    assert json.loads(result.output)["lr"] == [0.25, 0.5, 0.25, 0.0]


def test_a_job_without_a_number_of_steps_needs_one(job: Path) -> None:
    job.write_text(JOB.replace("steps: 10", "epochs: 1", 1))
    with pytest.raises(JobError, match="give --steps"):
        CliRunner().invoke(app, ["show", str(job)], catch_exceptions=False)


def test_a_plot_shows_the_highest_rate_of_each_column() -> None:
    lines = text_plot([0.0, 0.5, 1.0, 0.5], width=2, height=2).splitlines()
    assert lines[0].endswith("│ █")
    assert lines[1].endswith("│██")


def test_a_picture_of_a_long_run_stays_small() -> None:
    assert len(svg_plot([1.0] * 1_000_000, "long")) < 100_000


def test_a_job_without_a_schedule_has_a_constant_rate(job: Path) -> None:
    job.write_text(JOB.replace("lr_schedule: {name: linear, warmup_steps: 2}", ""))
    arguments = ["show", str(job), "--picture", "rate.svg", "--set", "steps=1200"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    lines = result.output.splitlines()
    assert lines[0] == "constant, 1,200 steps"
    assert lines[-2:] == ["first 0.5, highest 0.5 in step 0, last 0.5", "picture in rate.svg"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).output)
    assert (found["schedule"], found["picture"], found["lr"]) == ("constant", "rate.svg", [0.5] * 1200)
    assert not Path("job-lr.svg").exists()


def test_a_picture_that_cannot_be_written_is_an_error_of_its_option(job: Path) -> None:
    with pytest.raises(JobError) as error:
        CliRunner().invoke(app, ["show", str(job), "--picture", "absent/rate.svg"], catch_exceptions=False)
    assert str(error.value) == "--picture absent/rate.svg: cannot be written: No such file or directory"


#: A schedule whose factors are none, or which cannot be made.
PLUGIN = """
from collections.abc import Iterator
from typing import Literal
from d9d_core.config import PluginConfig
from d9d_core.errors import JobError
from d9d_core.plugin import LrScheduleSpec, Ref, hookimpl

class Config(PluginConfig):
    name: Literal["faulty"] = "faulty"
    refuses: bool = False

def build(config, total):
    if config.refuses:
        raise JobError(f"no schedule of {total} steps")
    raise KeyError("no curve")

@hookimpl
def d9d_lr_schedules() -> Iterator[LrScheduleSpec]:
    ref = lambda name: Ref(f"{__name__}:{name}")
    yield LrScheduleSpec(name="faulty", summary="Faulty.", config=ref("Config"), build=ref("build"))
"""


def test_a_schedule_that_cannot_be_built_is_an_error_of_its_plugin_or_of_the_job(job: Path) -> None:
    Path("faulty.py").write_text(PLUGIN)
    job.write_text(JOB.replace("{name: linear, warmup_steps: 2}", "{name: faulty}"))
    asked = ["show", str(job), "--plugin", "faulty.py"]
    with pytest.raises(PluginError, match=r"^lr schedule 'faulty' \(faulty.py\): \w+:build failed: KeyError\("):
        CliRunner().invoke(app, asked, catch_exceptions=False)
    with pytest.raises(JobError, match=r"^no schedule of 7 steps$"):
        CliRunner().invoke(app, [*asked, "--set", "lr_schedule.refuses=true", "--steps", "7"], catch_exceptions=False)


def test_an_entry_that_is_no_schedule_is_an_error_of_its_plugin() -> None:
    entry = type("Entry", (), {"spec": 7, "__str__": lambda _self: "'odd' (here)"})()
    job: Any = SimpleNamespace(
        registry=SimpleNamespace(find=lambda kind, name: {("lr schedule", "odd"): entry}[kind, name]),
        lr_schedule=SimpleNamespace(selector="odd"),
    )
    with pytest.raises(PluginError, match=r"^lr schedule 'odd' \(here\) is declared with a int; it takes a LrSchedu"):
        commands._schedule(job, 3)
