"""A run saves its job with all defaults filled in: a sound job file, of the same job, that trains to the same bits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.job_file.reading import write_yaml
from d9d_engine.job import Job
from d9d_engine.run.directory import JOB

from tests.sound_jobs import SoundJobs

Write = Callable[..., Path]
D9d = Callable[..., tuple[int, str, str]]


def saved(job: Job, path: Path) -> Path:
    path.write_text(write_yaml(job.resolved()))
    return path


def assert_resolves_to_itself(job: Job, path: Path) -> None:
    file = saved(job, path)
    again = Job.load(file, registry=job.registry)
    assert again.resolved() == job.resolved()
    assert write_yaml(again.resolved()) == file.read_text()
    assert again == job
    JobFile.load(file, registry=job.registry).check()


@pytest.mark.thorough
def test_each_installed_component_is_part_of_a_sound_job_that_resolves_to_itself(tmp_path: Path) -> None:
    jobs = SoundJobs(seed=1)
    for kind, names in jobs.kinds().items():
        for name in names:
            assert_resolves_to_itself(jobs.draw(kind, name), tmp_path / "job.yaml")


@pytest.mark.full
def test_three_hundred_sound_jobs_resolve_to_themselves(tmp_path: Path) -> None:
    jobs = SoundJobs(seed=2)
    for _ in range(300):
        assert_resolves_to_itself(jobs.draw(), tmp_path / "job.yaml")


CHOICES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": {"name": "muon", "groups": [{"match": "*norm*", "weight_decay": 0.1}]}},
    "master weights": {
        "optimizer": {"name": "adamw", "lr": 0.01, "master_weights": True, "groups": [{"match": "*", "lr_scale": 1.0}]},
        "precision": {"parameters": "bfloat16"},
    },
    "warm-up, decay": {"lr_schedule": {"name": "warmup_stable_decay", "decay_steps": 3}},
    "infinite norm": {"gradient_clipping": {"p": math.inf, "max_norm": 0.1}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("choice", CHOICES)
def test_the_saved_job_passes_check_and_trains_to_the_same_bits(
    d9d: D9d, small_job: Write, tmp_path: Path, choice: str
) -> None:
    status, _, error = d9d("train", str(small_job("run", **CHOICES[choice])))
    assert status == 0, error
    job = tmp_path / "runs" / "run" / JOB
    assert d9d("check", str(job))[0] == 0
    status, _, error = d9d("train", str(job), "--set", "run.name=again")
    assert status == 0, error
    one, two = (tmp_path / "runs" / name / "model" / "model.safetensors" for name in ("run", "again"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("task", {"name": "dpo", "beta": math.inf}),
        ("task", {"name": "causal_lm", "z_loss": math.nan}),
        ("run", {"hparams": {"deep": [math.inf]}}),
        ("optimizer", {"name": "torch", "target": "torch.optim.RAdam", "arguments": {"eps": math.inf}}),
    ],
    ids=["field", "nan", "free values", "arguments"],
)
def test_a_number_that_no_saved_job_can_hold_is_refused(small_job: Write, section: str, value: Any) -> None:
    with pytest.raises(JobError, match="finite|not a field"):
        Job.load(small_job(**{section: value}))


def test_dates_of_toml_are_texts_as_in_yaml(small_job: Write, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    values = json.loads(small_job().read_text())
    file.write_text("run.hparams = {day = 2026-01-02, hour = 07:32:00}\n" + "\n".join(toml(values)))
    assert Job.load(file).run.hparams == {"day": "2026-01-02", "hour": "07:32:00"}


def toml(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from toml(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {json.dumps(value)}"


def test_no_config_tells_choices_from_defaults_by_presence() -> None:
    """In a saved job every field is present."""
    root = Path(__file__).parents[1]
    files = [file for pattern in ("packages/*/src", "plugins/*/src") for file in root.glob(f"{pattern}/**/*.py")]
    assert len(files) > 400
    presence = re.compile(r"model_fields_set|exclude_unset|__pydantic_fields_set__")
    assert [str(file) for file in files if presence.search(file.read_text())] == []


MOVES = """
import os
from typing import Literal
os.chdir({elsewhere!r})

from d9d_core.config import PluginConfig
from d9d_core.plugin import Ref, SubscriberSpec, hookimpl


class Config(PluginConfig):
    name: Literal["mover"] = "mover"


class Mover:
    def __init__(self, *arguments):
        os.chdir({elsewhere!r})

    def subscriptions(self):
        return ()


@hookimpl
def d9d_subscribers():
    os.chdir({elsewhere!r})
    config, build = Ref(f"{{__name__}}:Config"), Ref(f"{{__name__}}:Mover")
    return [SubscriberSpec(name="mover", summary="Moves.", config=config, build=build)]
"""


@pytest.mark.thorough
def test_plugins_that_change_the_working_directory_do_not_move_the_run(
    d9d: D9d, small_job: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "moves.py").write_text(MOVES.format(elsewhere=str(elsewhere)))
    monkeypatch.chdir(tmp_path)
    job = small_job(run={"name": "run"}, plugins={"files": ["moves.py"]}, subscribers=["mover"])
    status, _, error = d9d("train", str(job))
    assert status == 0, error
    assert Path.cwd() == tmp_path
    assert (tmp_path / "runs" / "run" / JOB).is_file()
    assert list(elsewhere.iterdir()) == []
