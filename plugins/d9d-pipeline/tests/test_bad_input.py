"""What cannot be trained in stages is refused with a text that says why, while the job is planned if it can be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import D9dError
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.toy import plugin as toy_plugin
from d9d_testing.world import RankFailedError, World

PLUGINS = ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"]
JOB: dict[str, Any] = {
    "steps": 2,
    "device": "cpu",
    "batch": {"size": 8, "microbatch": 1},
    "model": {"name": "toy_model", "blocks": 4},
    "data": "toy_data",
    "task": "toy_task",
    "optimizer": "toy_optimizer",
    "trackers": [],
    "export": False,
}

#: Models, tasks and schedules as third parties might get them wrong.
WRONG = '''
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from d9d_core.config import ScheduleConfig
from d9d_core.schedule import Backward, Forward, Program
from d9d_core.plugin import ModelSpec, Ref, ScheduleSpec, TaskSpec, hookimpl
from d9d_core.types import Microbatch
from d9d_core.model import Stage
from d9d_core.task import StageInputs
from d9d_pipeline.schedule.insert_transfers import insert_transfers
from d9d_pipeline.schedule.placement import loop
from d9d_pipeline.schedule.breadth_first import gpipe
from d9d_testing.toy.config import ToyModelConfig, ToyTaskConfig
from d9d_testing.toy.model import ToyModel
from d9d_testing.toy.task import ToyTask
from torch import Tensor

HANDLERS = Ref("d9d_pipeline.runtime.handlers:handlers")

class WholeConfig(ToyModelConfig):
    name: Literal["whole_model"] = "whole_model"

class LiarConfig(ToyModelConfig):
    name: Literal["lying_model"] = "lying_model"
    lie: Literal["shape", "name", "failure"] = "shape"

class Liar(ToyModel):
    def __init__(self, config: LiarConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        self.lie, self.visits = config.lie, 0

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x=x)
        self.visits += 1
        if self.lie == "failure":
            if self.stage.is_last and self.visits == 3:
                raise RuntimeError("the third microbatch cannot be computed")
            return outputs
        if self.stage.is_last:
            return outputs
        return {"x": outputs["x"][:, :2]} if self.lie == "shape" else {"z": outputs["x"]}

class Mute(ToyModel):
    boundary = None

class MuteConfig(ToyModelConfig):
    name: Literal["mute_model"] = "mute_model"

class GenerousConfig(ToyTaskConfig):
    name: Literal["generous_task"] = "generous_task"

class Generous(ToyTask):
    def inputs(self, microbatch: Microbatch) -> StageInputs:
        return StageInputs(first={}, shared={"x": microbatch["x"]})

class ForgetfulConfig(ScheduleConfig):
    name: Literal["forgetful"] = "forgetful"

class CircularConfig(ScheduleConfig):
    name: Literal["circular"] = "circular"

class SilentConfig(ScheduleConfig):
    name: Literal["silent"] = "silent"

def build_forgetful(config: ForgetfulConfig) -> Any:
    def schedule(ranks: int, microbatches: int) -> Sequence[Program]:
        return [tuple(a for a in p if a != Backward(1, 2)) for p in gpipe(ranks, microbatches)]
    return schedule

def build_circular(config: CircularConfig) -> Any:
    """Rank 0 wants a gradient before it makes the next activation, and rank 1 all activations before any gradient."""
    def schedule(ranks: int, microbatches: int) -> Sequence[Program]:
        each = range(microbatches)
        first = [action for at in each for action in (Forward(0, at), Backward(0, at))]
        second = [Forward(1, at) for at in each] + [Backward(1, at) for at in each]
        return insert_transfers([first, second], loop(2, 1))
    return schedule

def build_silent(config: SilentConfig) -> Any:
    return gpipe

@hookimpl
def d9d_models() -> Iterator[ModelSpec]:
    for name, config, build, provides in (
        ("whole_model", "WholeConfig", "ToyModel", {"model:blocks"}),
        ("lying_model", "LiarConfig", "Liar", {"model:blocks", "model:pipeline"}),
        ("mute_model", "MuteConfig", "Mute", {"model:blocks", "model:pipeline"}),
    ):
        yield ModelSpec(
            name=name, summary="Wrong.", config=Ref(f"{__name__}:{config}"), build=Ref(f"{__name__}:{build}"),
            tiny=Ref(f"{__name__}:{config}"), hugging_face=Ref("d9d_testing.toy.model:ToyFormat"), provides=provides,
        )

@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    yield TaskSpec(
        name="generous_task", summary="Wrong.", config=Ref(f"{__name__}:GenerousConfig"),
        build=Ref(f"{__name__}:Generous"),
    )

@hookimpl
def d9d_schedules() -> Iterator[ScheduleSpec]:
    for name, handlers in (("forgetful", HANDLERS), ("circular", HANDLERS), ("silent", None)):
        yield ScheduleSpec(
            name=name, summary="Wrong.", config=Ref(f"{__name__}:{name.title()}Config"),
            build=Ref(f"{__name__}:build_{name}"), handlers=handlers,
        )
'''


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    """The plugin above."""
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    return str(file)


def complaint(values: dict[str, Any], *plugins: str) -> str:
    """Why a job cannot be planned."""
    with pytest.raises(D9dError) as caught:
        job_of({**JOB, **values}, [*PLUGINS, *plugins]).plan()
    return str(caught.value)


PP2 = {"mesh": {"pp": 2}}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no schedule": (
        PP2,
        "mesh.pp is 2, but no component of the job uses that axis; add a schedule to 'pipeline', or set it to 1",
    ),
    "more stages than layers": (
        {"mesh": {"pp": 4}, "pipeline": "zero_bubble_v"},
        "toy_model: 4 blocks cannot be split over 8 stages as [1, 1, 1, 1, 0, 0, 0, 0]; give pipeline.layers 8 numbers "
        "that sum up to 4, or take fewer stages",
    ),
    "too few microbatches": (
        {**PP2, "pipeline": "dual_pipe_v", "batch": {"size": 6, "microbatch": 2}},
        "pipeline: dual_pipe_v: 3 microbatch(es) are too few for 2 pipeline rank(s); at least 4: raise batch.size, "
        "lower batch.microbatch, or choose another schedule",
    ),
    "other number of layers": (
        {**PP2, "pipeline": {"name": "1f1b", "layers": [1, 1, 2]}},
        "toy_model: 4 blocks cannot be split over 2 stages as [1, 1, 2]; give pipeline.layers 2 numbers that sum up to "
        "4, or take fewer stages",
    ),
    "other sum of layers": (
        {**PP2, "pipeline": {"name": "1f1b", "layers": [1, 2]}},
        "toy_model: 4 blocks cannot be split over 2 stages as [1, 2]; give pipeline.layers 2 numbers that sum up to 4, "
        "or take fewer stages",
    ),
    "a stage without layers": (
        {**PP2, "pipeline": {"name": "1f1b", "layers": [0, 4]}},
        "pipeline.layers[0]: input should be greater than 0, got 0",
    ),
    "pipeline ranks of another number": (
        {"mesh": {"pp": 3}, "pipeline": "1f1b", "batch": {"size": 8, "microbatch": 8}, "model": "toy_model"},
        "toy_model: 2 blocks cannot be split over 3 stages",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_or_scheduled_is_refused(case: str) -> None:
    values, text = CASES[case]
    assert text in complaint(values)


WRONG_PLUGINS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a model in one piece": (
        {"model": {"name": "whole_model", "blocks": 4}, "pipeline": "1f1b"},
        [
            "pipeline: '1f1b' cuts the model into 2 stages, but model 'whole_model' (",
            "lacks the trait 'model:pipeline'",
        ],
    ),
    "a stage that says nothing": (
        {"model": {"name": "mute_model", "blocks": 4}, "pipeline": "1f1b"},
        ["mute_model", "Mute does not declare a stage's outputs; give it boundary()"],
    ),
    "a forgotten backward": (
        {"pipeline": "forgetful"},
        [
            "pipeline: invalid program for 8 microbatch(es): B1.2 missing on rank 1: a stage computes each microbatch "
            "once",
            "This is an error of the schedule: choose another one, or repair its plugin",
        ],
    ),
    "a deadlock": (
        {"pipeline": "circular"},
        [
            "pipeline: invalid program for 8 microbatch(es): deadlock",
            "rank 0 at ",
            " waits for ",
            " on rank 1",
            "This is an error of the schedule: choose another one, or repair its plugin",
        ],
    ),
    "actions that nothing runs": (
        {"pipeline": "silent"},
        [
            "pipeline: 'silent' has actions without a handler: ReceiveActivation, ReceiveGradient, SendActivation, "
            "SendGradient; declare 'handlers' in its plugin",
        ],
    ),
}


@pytest.mark.parametrize("case", WRONG_PLUGINS)
def test_wrong_models_and_schedules_are_refused_before_anything_starts(wrong: str, case: str) -> None:
    values, texts = WRONG_PLUGINS[case]
    found = complaint({**PP2, **values}, wrong)
    assert [text for text in texts if text not in found] == [], found


def train(values: dict[str, Any], plugins: list[str]) -> None:
    """Train; runs on every rank of a world."""
    job = job_of(values, plugins)
    job.build(lambda _note: None, topology_here(job)).train()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (
            "shape",
            "boundary() of stage 0 declares {'x': (1, 4)}, but forward returned {'x': (1, 2)}; correct one of them",
        ),
        (
            "name",
            "boundary() of stage 0 declares {'x': (1, 4)}, but forward returned {'z': (1, 4)}; correct one of them",
        ),
    ],
)
def test_a_stage_that_returns_something_else_than_it_announces_is_named(
    world: type[World], wrong: str, tmp_path: Path, lie: str, text: str
) -> None:
    model = {"name": "lying_model", "blocks": 4, "lie": lie}
    values = {**JOB, **PP2, "pipeline": "1f1b", "model": model, "run": {"dir": str(tmp_path)}}
    with pytest.raises(RankFailedError) as caught:
        world(2, timeout=30.0).run(train, values, [*PLUGINS, wrong])
    assert text in str(caught.value)


@pytest.mark.thorough
def test_what_comes_from_the_previous_stage_and_from_the_task_is_named(
    world: type[World], wrong: str, tmp_path: Path
) -> None:
    values = {**JOB, **PP2, "pipeline": "1f1b", "task": "generous_task", "run": {"dir": str(tmp_path)}}
    with pytest.raises(RankFailedError) as caught:
        world(2, timeout=30.0).run(train, values, [*PLUGINS, wrong])
    assert "stage 1 gets the input x twice, from the previous stage and from the task's shared inputs; rename" in str(
        caught.value
    )


@pytest.mark.full
def test_a_stage_that_fails_ends_all_ranks_with_one_message_that_names_its_rank(wrong: str, tmp_path: Path) -> None:
    model = {"name": "lying_model", "blocks": 4, "lie": "failure"}
    files = [str(Path(toy_plugin.__file__)), wrong]
    values = {**JOB, **PP2, "pipeline": "1f1b", "model": model, "run": {"dir": str(tmp_path)}, "plugins": files}
    (tmp_path / "job.json").write_text(json.dumps(values))
    command = [sys.executable, "-m", "d9d_core", "train", str(tmp_path / "job.json"), "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "rank 1 (pp=1) on " in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("RuntimeError:") == 1
    assert "RuntimeError: the third microbatch cannot be computed" in done.stderr
