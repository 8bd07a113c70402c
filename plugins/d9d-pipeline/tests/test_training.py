"""Runs in stages leave the same results as a run of the whole model: logs, evaluations and the exported model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.logs import read_log_without_times
from d9d_testing.tolerances import assert_close_values
from d9d_testing.world import World
from d9d_weights.hugging_face.directory import ModelDirectory
from torch import Tensor

PLUGINS = ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"]
SCHEDULES = ("gpipe", "looped_bfs", "1f1b", "interleaved_1f1b", "zb1p", "zero_bubble_v", "dual_pipe_v")
#: A whole backward, a split one, and one whose first and last stage are on the same rank.
OF_EACH_KIND = ("1f1b", "zb1p", "zero_bubble_v")
#: What trains: all parameters, only parameters of the first stage, or only of the last.
TRAINED: dict[str, Mapping[str, Any]] = {
    "all": {},
    "first": {"peft": {"name": "toy_peft", "trains": ["layers.0.weight"]}},
    "last": {"peft": {"name": "toy_peft", "trains": ["layers.4.weight"]}},
}

RUNS = [(schedule, "all") for schedule in SCHEDULES] + list(product(OF_EACH_KIND, ("first", "last")))


def job(directory: Path, name: str, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "dir": str(directory)},
        "steps": 4,
        "device": "cpu",
        "batch": {"size": 8, "microbatch": 1},
        "model": {"name": "toy_model", "blocks": 5, "dropout": 0.0},
        "data": "toy_data",
        "task": {"name": "toy_task", "decay": 0.01},
        "optimizer": "toy_optimizer",
        "metrics": ["toy_metric"],
        "gradient_clipping": {"max_norm": 0.05},
        "evaluation": {"every": 2, "packs": 2, "data": "toy_data"},
        "logging": {"every": 1},
        "trackers": [{"name": "jsonl", "picture": False}],
        **sections,
    }


def train(jobs: list[dict[str, Any]]) -> list[int]:
    """Whole runs, one after the other; runs on every rank of a world. The steps that each made."""
    found = []
    for values in jobs:
        trained = job_of(values, PLUGINS)
        found.append(trained.build(lambda _note: None, topology_here(trained)).train().step)
    return found


def log(directory: Path, name: str) -> list[dict[str, float]]:
    return read_log_without_times(directory / name)


def exported(directory: Path, name: str) -> dict[str, Tensor]:
    with ModelDirectory.open(directory / name / "model") as model:
        tensors = {key: torch.empty(spec.shape, dtype=spec.dtype) for key, spec in model.specs.items()}
        for key, tensor in tensors.items():
            model.read(key, [0] * tensor.ndim, tensor)
    return tensors


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, in two worlds."""
    directory = tmp_path_factory.mktemp("runs")
    whole = [job(directory, f"whole-{trained}", **sections) for trained, sections in TRAINED.items()]
    assert World(1, timeout=60.0).run(train, whole) == [[4] * 3]
    staged = [
        job(directory, f"{schedule}-{trained}", pipeline=schedule, mesh={"pp": 2}, **TRAINED[trained])
        for schedule, trained in RUNS
    ]
    assert World(2, timeout=120.0).run(train, staged) == [[4] * len(RUNS)] * 2
    return directory


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.parametrize(("schedule", "trained"), RUNS)
def test_a_run_in_stages_leaves_what_a_run_in_one_piece_leaves(runs: Path, schedule: str, trained: str) -> None:
    name, whole = f"{schedule}-{trained}", f"whole-{trained}"
    lines, expected = log(runs, name), log(runs, whole)
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]  # and evaluations after the second and the fourth
    for line, wanted in zip(lines, expected, strict=True):
        assert line == pytest.approx(wanted, rel=2e-5)
    assert {"loss/decay", "absolute_error", "grad_norm"} <= lines[0].keys()
    assert {"eval/loss", "eval/decay"} <= lines[2].keys()
    weights, wanted_weights = (exported(runs, run) for run in (name, whole))
    assert weights.keys() == wanted_weights.keys()
    for key, weight in weights.items():
        assert_close_values(weight, wanted_weights[key])


@pytest.mark.thorough
@pytest.mark.parametrize("trained", ["first", "last"])
def test_what_is_frozen_stays_and_what_trains_moves_wherever_it_is(runs: Path, trained: str) -> None:
    first, last = (exported(runs, f"1f1b-{name}") for name in ("first", "last"))
    assert {name for name in first if not first[name].equal(last[name])} == {
        "toy.layers.0.weight",
        "toy.layers.4.weight",
    }
    scale = (first if trained == "first" else last)["toy.scale"]
    assert scale.item() == 2.0  # merged on the stage that has it
