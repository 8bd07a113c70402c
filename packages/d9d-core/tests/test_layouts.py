"""Layouts of a job: ``auto``, problems of sizes, and the edit that corrects them. Strategies are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.config import PluginConfig
from d9d_core.errors import BuildError, D9dError, JobError
from d9d_core.job import JobFile
from d9d_core.job_file.document import Document
from d9d_core.job_file.job import Batch, Best, Mesh
from d9d_core.job_file.reading import write_yaml
from d9d_core.job_file.resolve import select_parts
from d9d_core.job_file.saved_job import SavedJob
from d9d_core.layout import mend, report
from d9d_core.layout.auto import settle
from d9d_core.layout.check import (
    Problem,
    _divisors,
    _either,
    _nearest,
    covers,
    idle_parts,
    largest_divisor,
    layout_problems,
    near_multiples,
    strategies_for,
    unused_axes,
)
from d9d_core.layout.mend import edit, mended, written
from d9d_core.layout.report import check_layout
from d9d_core.plugin import Ref, StrategySpec, hookimpl
from d9d_core.program import placement
from d9d_core.program.placement import Pipeline, plan_pipeline
from d9d_core.registry.registry import Registry
from d9d_core.schedule import Action

JOB = {
    "steps": 3,
    "model": {"name": "toy_model", "blocks": 8},
    "data": "toy_data",
    "task": "toy_task",
    "optimizer": "toy_optimizer",
}


class ShardsConfig(PluginConfig):
    """Uses dp_shard."""

    name: Literal["shards"] = "shards"
    degree: int = 1


class TilesConfig(PluginConfig):
    """Uses tp and cp."""

    name: Literal["tiles"] = "tiles"


class CopiesConfig(PluginConfig):
    """Uses dp_replicate."""

    name: Literal["copies"] = "copies"


class ExpertsConfig(PluginConfig):
    """Uses ep."""

    name: Literal["experts"] = "experts"


class Here(Ref):
    def load(self) -> Any:
        configs = (ShardsConfig, TilesConfig, CopiesConfig, ExpertsConfig)
        return {config().name: config for config in configs}[self.target.partition(":")[2]]


@hookimpl
def d9d_strategies() -> list[StrategySpec]:
    axes = {"shards": {"dp_shard"}, "tiles": {"tp", "cp"}, "copies": {"dp_replicate"}, "experts": {"ep"}}
    return [
        StrategySpec(
            name=name, summary="x", config=Here(f"my:{name}"), build=Here(f"my:{name}"), anchor="data", axes=used
        )
        for name, used in axes.items()
    ]


REGISTRY = Registry.of(toy, SimpleNamespace(__name__="acme", d9d_strategies=d9d_strategies))


def job(world_size: int | None = None, **sections: Any) -> JobFile:
    return JobFile.from_values({**JOB, **sections}, registry=REGISTRY, world_size=world_size)


def problems(world_size: int, auto: str | None = None, **sections: Any) -> list[str]:
    made = job(**sections)
    return [problem.text for problem in layout_problems(made, select_parts(made, REGISTRY), REGISTRY, world_size, auto)]


def edited(world_size: int, **sections: Any) -> str | None:
    made = job(**sections)
    fitting = mended(made, REGISTRY, world_size)
    return None if fitting is None else edit(made, fitting)


# --- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "world_size", "resolved"),
    [
        ({"dp_shard": "auto"}, 4, {"dp_shard": 4}),
        ({"dp_shard": "auto", "tp": 2, "pp": 3}, 13, {"dp_shard": 2, "tp": 2, "pp": 3}),
        ({"dp_replicate": "auto", "dp_shard": 2}, 8, {"dp_replicate": 4, "dp_shard": 2}),
        ({"dp_shard": "auto", "tp": 8}, 4, {"dp_shard": 1, "tp": 8}),
        ({"dp_shard": "auto", "tp": 0, "cp": "x", "pp": True}, 4, {"dp_shard": 4, "tp": 0, "cp": "x", "pp": True}),
        ({"dp_shard": "auto"}, None, {"dp_shard": 1}),
    ],
)
def test_auto_becomes_the_processes_divided_by_the_other_axes(
    mesh: dict[str, Any], world_size: int | None, resolved: dict[str, Any]
) -> None:
    (axis,) = (axis for axis, size in mesh.items() if size == "auto")
    source = settle(Document({"mesh": mesh}), REGISTRY, world_size)
    assert (source.document.values["mesh"], source.auto, source.note) == (resolved, axis, None)


def test_a_saved_job_is_read_for_the_given_number_of_processes(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(
        write_yaml({**JOB, "parallel": ["copies"], "mesh": {"dp_replicate": "auto"}})
    )
    found = JobFile.load_saved(SavedJob(path, "d9d x --like job.yaml"), registry=REGISTRY, world_size=3)
    assert found.mesh.dp_replicate == 3


@pytest.mark.parametrize("mesh", [{"dp_shard": "auto", "dp_replicate": "auto"}, {"tp": "auto"}, {"tp": 2}, 3])
def test_a_mesh_that_auto_cannot_complete_is_left_alone(mesh: object) -> None:
    document = Document({"mesh": mesh})
    source = settle(document, REGISTRY, 4)
    assert source.document is document
    assert (source.auto, source.note) == (None, None)


@pytest.mark.parametrize(
    ("parallel", "axis", "settled"),
    [
        (["shards"], "dp_shard", ["shards"]),
        ([{"name": "copies"}], "dp_replicate", [{"name": "copies"}]),
        (["copies", "shards"], "dp_shard", ["copies", "shards"]),
    ],
)
def test_all_processes_go_along_the_axis_of_a_jobs_strategies(parallel: Any, axis: str, settled: Any) -> None:
    source = settle(Document({"parallel": parallel}, "job.yaml"), REGISTRY, 3)
    assert source.document.values == {"mesh": {axis: 3}, "parallel": settled}
    assert source.auto == axis
    assert source.note == f"mesh: job.yaml has no mesh: {axis} is 3, for 3 processes"


@pytest.mark.parametrize("parallel", [[], ["tiles", "unknown"]])
def test_a_job_without_a_data_parallel_strategy_gets_fsdp(parallel: list[str]) -> None:
    source = settle(Document({"parallel": parallel}, "job.yaml"), REGISTRY, 2)
    assert source.document.values == {"mesh": {"dp_shard": 2}, "parallel": [*parallel, "fsdp"]}
    assert source.note == "mesh: job.yaml has no mesh: dp_shard is 2, with the strategy fsdp, for 2 processes"


@pytest.mark.parametrize(("values", "world_size"), [({}, 1), ({}, None), ({"parallel": "shards"}, 2)])
def test_one_process_or_a_malformed_list_gets_no_layout(values: dict[str, Any], world_size: int | None) -> None:
    document = Document(values)
    assert settle(document, REGISTRY, world_size).document is document


def test_an_error_of_a_job_whose_layout_was_chosen_mentions_the_choice() -> None:
    with pytest.raises(D9dError) as caught:
        job(2)  # fsdp is not installed
    assert caught.value.__notes__ == ["mesh: job has no mesh: dp_shard is 2, with the strategy fsdp, for 2 processes"]


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_divisors_and_multiples_near_a_number() -> None:
    assert [_divisors(number) for number in (1, 2, 12, 16)] == [[1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16]]
    assert [largest_divisor(12, most) for most in (1, 3, 5, 12, 20)] == [1, 3, 4, 12, 12]
    assert [near_multiples(number, 4) for number in (1, 4, 7, 8)] == [[4], [4, 8], [4, 8], [8, 12]]
    assert _nearest([1, 2, 3, 4, 6, 8, 12, 24], 7) == [2, 3, 4, 6, 8, 12]
    assert [_either(values) for values in ([3], [3, 4], [3, 4, 5])] == ["3", "3 or 4", "3, 4 or 5"]


def test_expert_groups_cover_whole_inner_axes_and_divide_the_next() -> None:
    mesh = Mesh(tp=2, cp=3, dp_shard=4, dp_replicate=5)
    assert [ep for ep in range(1, 130) if covers(ep, mesh)] == [1, 2, 6, 12, 24, 120]


# --- problems ---------------------------------------------------------------------------------------------------------


def test_a_mesh_of_another_number_of_processes_says_what_to_start() -> None:
    assert problems(3, mesh={"dp_shard": 2}, parallel=["shards"]) == [
        "mesh: dp_shard=2 = 2 ranks, but the job was started with 3; change mesh or start 2 processes (d9d train "
        "--nproc 2, torchrun, or srun)"
    ]
    assert problems(2) == ["mesh: one process = 1 rank, but the job was started with 2; change mesh or start 1 process"]
    assert problems(6, "dp_shard", mesh={"dp_shard": 1, "tp": 4}, parallel=["shards", "tiles"]) == [
        "mesh.dp_shard is auto, but 6 processes are not a multiple of 4, the product of the other axes; start 4 or 8 "
        "processes, or change another axis"
    ]
    assert problems(8, mesh={"dp_shard": 4, "tp": 2}, parallel=["shards", "tiles"]) == []


def test_an_impossible_number_of_expert_groups_lists_the_nearest() -> None:
    assert problems(4, mesh={"dp_shard": 4, "ep": 3}, parallel=["shards", "experts"]) == [
        "mesh.ep: 3 ranks that split the experts must cover whole inner axes and divide the next one; here "
        "tp=1, cp=1, dp_shard=4, dp_replicate=1: use 1, 2 or 4"
    ]


def test_an_axis_that_nothing_uses_names_the_strategies_that_would() -> None:
    assert problems(2, mesh={"tp": 2}) == [
        "mesh.tp is 2, but no component of the job uses that axis; add a strategy for it (tiles) to 'parallel', or set "
        "it to 1"
    ]
    assert problems(2, mesh={"pp": 2}) == [
        "mesh.pp is 2, but no component of the job uses that axis; add a schedule to 'pipeline', or set it to 1"
    ]
    made = job(mesh={"tp": 2, "dp_replicate": 2, "cp": 1}, parallel=["tiles"])
    assert unused_axes(made.mesh, select_parts(made, REGISTRY)) == ["dp_replicate"]
    assert [spec.name for spec in strategies_for("cp", REGISTRY)] == ["tiles"]
    assert strategies_for("pp", REGISTRY) == []


@pytest.mark.parametrize(
    ("world_size", "sections", "text"),
    [
        (
            4,
            {"mesh": {"dp_shard": 4}, "batch": {"size": 10}},
            "batch.size 10 cannot be split over 4 data-parallel ranks; use 8 or 12",
        ),
        (
            4,
            {"mesh": {"dp_shard": 4}, "batch": {"size": 10, "microbatch": 2}},
            "batch.size 10 cannot be split over 4 data-parallel ranks; use 8 or 16",
        ),
        (
            4,
            {"mesh": {"dp_shard": 4}, "batch": {"size": 7}},
            "batch.size 7 fits no data-parallel layout of 4 processes, which share no divisor with it; use 4 or 8, or "
            "start 1 or 7 processes",
        ),
        (
            2,
            {"mesh": {"dp_shard": 2}, "batch": {"size": 12, "microbatch": 4}},
            "batch.size 12 on 2 data-parallel rank(s) is 6 samples each, not a multiple of batch.microbatch 4; use "
            "batch.microbatch 3, or batch.size 8 or 16",
        ),
        (
            1,
            {"batch": {"size": 16385, "microbatch": 1}, "parallel": []},
            "batch.size 16385 makes 16,385 microbatches per step on each rank, but at most 16,384 can be scheduled; "
            "make batch.microbatch larger",
        ),
    ],
)
def test_a_batch_that_cannot_be_divided_says_what_could(world_size: int, sections: dict[str, Any], text: str) -> None:
    assert problems(world_size, **{"parallel": ["shards"], **sections}) == [text]


def test_as_many_microbatches_as_can_be_scheduled_are_no_problem() -> None:
    assert problems(1, batch={"size": 16384, "microbatch": 1}) == []


@pytest.mark.parametrize(("saved", "evaluated"), [(3, 3), (4, 2), (2, 4), (6, 4), (4, 6), (3, 2), (2, 3)])
def test_the_best_checkpoint_is_among_those_of_evaluated_steps(saved: int, evaluated: int) -> None:
    sections: dict[str, Any] = {
        "export": "best", "checkpoint": {"every": saved}, "evaluation": {"every": evaluated, "data": "toy_data"},
    }  # fmt: skip
    if saved % evaluated == 0 or evaluated % saved == 0:
        assert job(**sections).checkpoint.best == Best(series="eval/loss", mode="min", keep=1)
        return
    with pytest.raises(JobError) as caught:
        job(**sections)
    assert (
        f"'export: best' needs checkpoints of evaluated steps, but checkpoint.every {saved} and evaluation.every "
        f"{evaluated} are not multiples; set checkpoint.every: {evaluated}"
    ) in str(caught.value)


def test_strategies_and_schedules_without_ranks_have_no_effect() -> None:
    made = job(mesh={"dp_replicate": 2}, parallel=["shards", "tiles", "copies"], pipeline="toy_schedule")
    assert idle_parts(made, select_parts(made, REGISTRY)) == [  # type: ignore[arg-type]
        "parallel[0]: strategy 'shards' has no effect, because mesh.dp_shard is 1; give it more ranks, or remove "
        "parallel[0]",
        "parallel[1]: strategy 'tiles' has no effect, because mesh.cp and mesh.tp are 1; give one more ranks, or "
        "remove parallel[1]",
        "pipeline: schedule 'toy_schedule' has no effect, because mesh.pp is 1; give it more ranks, or remove pipeline",
    ]
    unformatted = job(model="toy_linears")
    assert idle_parts(unformatted, select_parts(unformatted, REGISTRY)) == [  # type: ignore[arg-type]
        "export: model 'toy_linears' (d9d_testing.toy.plugin) has no Hugging Face layout, so the end of the run "
        "exports no model; checkpoints have the weights"
    ]
    silent = job(model="toy_linears", export=False)
    assert idle_parts(silent, select_parts(silent, REGISTRY)) == []  # type: ignore[arg-type]


# --- edits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "sections", "text"),
    [
        # A surplus or lack of processes goes to the data-parallel axes.
        (6, {"mesh": {"dp_shard": 2}, "parallel": ["shards"], "batch": {"size": 12}}, "mesh: {dp_shard: auto}"),
        (
            6,
            {"mesh": {"dp_replicate": 2, "dp_shard": 1}, "parallel": ["copies"], "batch": {"size": 12}},
            "mesh: {dp_replicate: auto}",
        ),
        (
            6,
            {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "parallel": ["copies", "shards"], "batch": {"size": 12}},
            "mesh: {dp_replicate: 2, dp_shard: auto}",
        ),
        (
            5,
            {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "parallel": ["copies", "shards"], "batch": {"size": 20}},
            "mesh: {dp_shard: auto}",
        ),
        (
            4,
            {"mesh": {"dp_shard": 4, "ep": 3}, "parallel": ["shards", "experts"]},
            "mesh: {dp_shard: auto, ep: 2}",
        ),
        # An axis gets a strategy if one is installed, else one rank.
        (2, {"mesh": {"tp": 2}}, "parallel: [tiles]"),
        (2, {"mesh": {"dp_shard": 2}, "parallel": ["toy_strategy"]}, "parallel: [toy_strategy, shards]"),
        # The batch is divided in another way before its size changes.
        (2, {"mesh": {"dp_shard": 2}, "parallel": ["shards"], "batch": {"size": 12, "microbatch": 4}},
         "batch: {size: 12, microbatch: 3}"),
        (4, {"mesh": {"dp_shard": 4}, "parallel": ["shards"], "batch": {"size": 10, "prefetch": 3}},
         "batch: {size: 8, prefetch: 3}"),
        (4, {"mesh": {"dp_shard": 4}, "parallel": ["shards"], "batch": {"size": 11, "microbatch": 1}},
         "batch: {size: 12, microbatch: 1}"),
        (1, {"batch": {"size": 32770, "microbatch": 1}}, "batch: {size: 32770, microbatch: 5}"),
    ],
)  # fmt: skip
def test_the_nearest_layout_that_fits_is_proposed(world_size: int, sections: dict[str, Any], text: str) -> None:
    assert edited(world_size, **sections) == text


@pytest.mark.parametrize(
    ("world_size", "sections"),
    [
        (3, {"mesh": {"tp": 2}, "parallel": ["tiles"]}),
        (2, {"mesh": {"dp_shard": 2}, "parallel": ["shards", "toy_pipeline_strategy"]}),
    ],
)
def test_no_layout_is_proposed_if_none_nearby_fits(world_size: int, sections: dict[str, Any]) -> None:
    assert edited(world_size, **sections) is None


def test_values_are_written_as_in_a_job_file() -> None:
    assert written(Mesh()) == {}
    assert written(Mesh(dp_replicate=2, dp_shard=3, tp=4)) == {"dp_replicate": 2, "dp_shard": "auto", "tp": 4}
    assert written(Mesh(dp_replicate=2, tp=4)) == {"dp_replicate": "auto", "tp": 4}
    assert written([ShardsConfig(), ShardsConfig(degree=2)]) == ["shards", {"degree": 2, "name": "shards"}]
    assert written(Batch(size=4)) == {"size": 4}
    assert written(Batch(size=4, microbatch=2, prefetch=0)) == {"size": 4, "microbatch": 2, "prefetch": 0}
    assert written(None) is None


# --- report -----------------------------------------------------------------------------------------------------------


def test_all_problems_are_one_error_with_requirements_and_an_edit() -> None:
    made = job(mesh={"dp_shard": 2}, parallel=["shards", "toy_pipeline_strategy"], batch={"size": 3})
    with pytest.raises(D9dError) as caught:
        check_layout(made, select_parts(made, REGISTRY), REGISTRY, 2, made.source)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(
        "batch.size 3 fits no data-parallel layout of 2 processes, which share no divisor with it; use 2 or 4, or "
        "start 1 or 3 processes"
    )
    assert lines[1].startswith("parallel[1]: ")
    assert len(lines) == 2
    made = job(mesh={"dp_shard": 2}, parallel=["shards"], batch={"size": 3})
    with pytest.raises(D9dError) as caught:
        check_layout(made, select_parts(made, REGISTRY), REGISTRY, 2, made.source)
    assert caught.value.__notes__ == ["to correct it, write in job:\nbatch: {size: 2}"]
    fitting = job(mesh={"dp_shard": 2}, parallel=["shards", "toy_pipeline_strategy"], batch={"size": 4})
    check_layout(fitting, select_parts(fitting, REGISTRY), REGISTRY, 2, fitting.source)


def test_an_only_problem_that_a_schedule_raised_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    own, made = BuildError("too few microbatches"), job()
    problems = [Problem(("pipeline",), "too few microbatches", own)]
    monkeypatch.setattr(report, "layout_problems", lambda *_: problems)
    with pytest.raises(BuildError) as caught:
        check_layout(made, select_parts(made, REGISTRY), REGISTRY, 1, made.source)
    assert caught.value is own
    problems.append(Problem(("mesh",), "another"))
    with pytest.raises(JobError, match="job: too few microbatches\njob: another$"):
        check_layout(made, select_parts(made, REGISTRY), REGISTRY, 1, made.source)


def test_an_axis_that_no_installed_strategy_uses_gets_one_rank() -> None:
    bare = Registry.of(toy)
    made = JobFile.from_values({**JOB, "mesh": {"tp": 2}}, registry=bare)
    fitting = mended(made, bare, 1)
    assert fitting is not None
    assert edit(made, fitting) == "mesh: {}"
    assert mended(made, bare, 2) is None


@pytest.mark.parametrize(
    ("ep", "world_size", "left"), [(2, 1, 1), (3, 4, 2), (4, 4, 4), (8, 4, 4), (3, 6, 3), (5, 6, 3)]
)
def test_expert_groups_become_the_largest_number_that_still_fits(ep: int, world_size: int, left: int) -> None:
    made = job(mesh={"dp_shard": 64, "ep": ep}, parallel=["shards", "experts"])
    found = mend._with_ranks(made, REGISTRY, world_size).mesh
    assert (found.dp_shard, found.ep) == (world_size, left)


@pytest.mark.parametrize("ranks", [1, 2])
def test_pipeline_ranks_need_a_schedule(ranks: int) -> None:
    made: Any = SimpleNamespace(mesh=Mesh(pp=ranks), pipeline=None)
    selection: Any = SimpleNamespace(schedule=None)
    if ranks == 1:
        assert plan_pipeline(made, selection) == Pipeline()
        return
    with pytest.raises(BuildError, match="^mesh.pp is 2, but the job names no schedule; add 'pipeline: <name>'"):
        plan_pipeline(made, selection)


def test_actions_of_a_schedule_need_handlers() -> None:
    class Odd(Action):
        pass

    class Queer(Action):
        pass

    placement._check_handled("mine", frozenset(Pipeline().kinds))
    kinds = frozenset({Queer, Odd, *Pipeline().kinds})
    with pytest.raises(
        BuildError, match="^pipeline: 'mine' has actions without a handler: Odd, Queer; declare 'handlers'"
    ):
        placement._check_handled("mine", kinds)
