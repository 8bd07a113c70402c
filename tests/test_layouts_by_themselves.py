"""Meshes that job files leave to the number of processes, and the one error of a layout that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import d9d_parallel.plugin as parallel_plugin
import d9d_pipeline.plugin as pipeline_plugin
import d9d_testing.toy.plugin as toy
import pytest
import yaml
from d9d_core.errors import BuildError, D9dError, JobError
from d9d_core.job import JobFile
from d9d_core.registry.registry import Registry
from d9d_engine.distributed import devices
from hypothesis import given, settings
from hypothesis import strategies as st

Values = dict[str, Any]

TOY: Values = {
    "steps": 3,
    "model": "toy_model",
    "data": "toy_data",
    "task": "toy_task",
    "optimizer": {"name": "toy_optimizer", "lr": 0.1},
}
INSTALLED = Registry.of(toy, parallel_plugin, pipeline_plugin)


def job(world_size: int | None = None, **sections: Any) -> JobFile:
    return JobFile.from_values({**TOY, **sections}, registry=INSTALLED, world_size=world_size)


def complaint(world_size: int, **sections: Any) -> str:
    with pytest.raises(D9dError) as caught:
        job(world_size, **sections).check(world_size)
    return str(caught.value)


def advice(error: D9dError) -> Values:
    (note,) = error.__notes__
    first, _, text = note.partition("\n")
    assert first == "to correct it, write in job:"
    values = yaml.safe_load(text)
    assert isinstance(values, dict)
    return values


# --- choices by the number of processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "world_size", "expected"),
    [
        ({"dp_shard": "auto"}, 8, {"dp_shard": 8}),
        ({"dp_shard": "auto"}, None, {"dp_shard": 1}),
        ({"dp_shard": "auto", "pp": 2}, 8, {"dp_shard": 4, "pp": 2}),
        ({"dp_replicate": "auto", "dp_shard": 2}, 8, {"dp_shard": 2, "dp_replicate": 4}),
        ({"dp_shard": "auto", "ep": 4}, 8, {"dp_shard": 8, "ep": 4}),
    ],
)
def test_auto_is_what_the_other_axes_leave(mesh: Values, world_size: int | None, expected: Values) -> None:
    sizes = job(world_size, mesh=mesh).mesh.sizes()
    assert {axis: size for axis, size in sizes.items() if size > 1 or axis in expected} == expected


def test_what_is_saved_of_a_job_has_plain_numbers() -> None:
    settled = job(4, mesh={"dp_shard": "auto"}, parallel=["fsdp"])
    assert settled.resolved()["mesh"]["dp_shard"] == 4
    assert JobFile.from_values(settled.resolved(), registry=INSTALLED) == settled
    assert json.loads(json.dumps(settled.resolved()))["mesh"]["dp_shard"] == 4


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({"dp_shard": "auto", "dp_replicate": "auto"}, "mesh.dp_shard: auto on two axes: only one of dp_shard or"),
        ({"tp": "auto"}, "mesh.tp: auto is possible for dp_shard or dp_replicate only"),
    ],
)
def test_only_one_data_parallel_axis_can_be_auto(mesh: Values, text: str) -> None:
    with pytest.raises(JobError, match=text):
        job(4, mesh=mesh)


def test_one_file_is_a_job_of_one_process_and_of_eight() -> None:
    alone, many = job(1), job(8)
    assert (alone.mesh.world_size, alone.parallel, alone.source.note) == (1, [], None)
    assert (many.mesh.dp_shard, [config.name for config in many.parallel]) == (8, ["fsdp"])
    assert many.source.note == "mesh: job has no mesh: dp_shard is 8, with the strategy fsdp, for 8 processes"
    many.check(8)


@pytest.mark.parametrize(("strategy", "axis"), [("replicate", "dp_replicate"), ("hsdp", "dp_shard")])
def test_a_job_without_a_mesh_keeps_its_own_data_parallelism(strategy: str, axis: str) -> None:
    given_one = job(4, parallel=[{"name": strategy}])
    assert (given_one.mesh.sizes()[axis], len(given_one.parallel)) == (4, 1)
    given_one.check(4)


def test_a_job_with_a_mesh_gets_no_strategy() -> None:
    assert "mesh: one process = 1 rank, but the job was started with 2" in complaint(2, mesh={})


def test_without_the_package_of_the_strategy_the_error_says_what_to_install() -> None:
    with pytest.raises(JobError, match="'fsdp' comes from d9d-parallel; install it with: pip install") as caught:
        JobFile.from_values(TOY, registry=Registry.of(toy), world_size=2)
    assert caught.value.__notes__ == [job(2).source.note]


# --- one error for everything -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "sections", "texts", "edit"),
    [
        (
            4,
            {"batch": {"size": 10}, "mesh": {"dp_shard": 4}, "parallel": ["fsdp"]},
            ["batch.size 10 cannot be split over 4 data-parallel ranks; use 8 or 12"],
            {"batch": {"size": 8}},
        ),
        (
            4,
            {"batch": {"size": 7}},
            ["batch.size 7 fits no data-parallel layout of 4 processes", "use 4 or 8, or start 1 or 7 processes"],
            {"batch": {"size": 8}},
        ),
        (
            2,
            {"batch": {"size": 4, "microbatch": 4}},
            ["is 2 samples each, not a multiple of batch.microbatch 4; use batch.microbatch 2, or batch.size 8"],
            {"batch": {"size": 4, "microbatch": 2}},
        ),
        (
            8,
            {"mesh": {"dp_shard": 3, "tp": 2}, "batch": {"size": 4}},
            [
                "mesh: dp_shard=3 x tp=2 = 6 ranks, but the job was started with 8",
                "mesh.dp_shard is 3, but no component of the job uses that axis; add a strategy for it (fsdp or hsdp)",
                "mesh.tp is 2, but no component of the job uses that axis; add a strategy",
                "batch.size 4 cannot be split over 3 data-parallel ranks; use 3 or 6",
            ],
            {"mesh": {"dp_shard": "auto"}, "parallel": ["fsdp"], "batch": {"size": 8}},
        ),
        (
            6,
            {"mesh": {"pp": 4, "dp_shard": "auto"}, "pipeline": "1f1b", "batch": {"size": 16, "microbatch": 1}},
            ["mesh.dp_shard is auto, but 6 processes are not a multiple of 4", "start 4 or 8 processes"],
            None,
        ),
        (
            2,
            {"mesh": {"pp": 2}, "batch": {"size": 8}},
            ["mesh.pp is 2, but no component of the job uses that axis; add a schedule to 'pipeline', or set it to 1"],
            {"pipeline": "1f1b"},
        ),
        (
            4,
            {"mesh": {"dp_shard": 4, "ep": 3}, "parallel": ["fsdp"], "batch": {"size": 8}},
            ["mesh.ep: 3 ranks that split the experts must cover whole inner axes", "dp_replicate=1: use 1, 2 or 4"],
            {"mesh": {"dp_shard": "auto"}},
        ),
    ],
    ids=["batch", "no layout", "microbatch", "everything", "auto", "no schedule", "expert groups"],
)
def test_one_error_names_all_problems_and_the_edit_that_mends_them(
    world_size: int, sections: Values, texts: list[str], edit: Values | None
) -> None:
    with pytest.raises(D9dError) as caught:
        job(world_size, **sections).check(world_size)
    for text in texts:
        assert text in str(caught.value)
    if edit is None:
        assert not getattr(caught.value, "__notes__", ())
        return
    assert advice(caught.value) == edit
    job(world_size, **{**sections, **edit}).check(world_size)


def test_a_schedule_with_too_few_microbatches_gets_more() -> None:
    sections: Values = {"mesh": {"pp": 2}, "pipeline": "dual_pipe_v", "batch": {"size": 8}}
    with pytest.raises(BuildError, match="1 microbatch.* are too few for 2 pipeline rank.*; at least 4") as caught:
        job(2, **sections).check(2)
    edit = advice(caught.value)
    assert edit == {"batch": {"size": 8, "microbatch": 2}}
    job(2, **{**sections, **edit}).check(2)


def test_problems_are_named_at_their_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(TOY) + "mesh:\n  dp_shard: 3\nbatch:\n  size: 10\n")
    with pytest.raises(JobError) as caught:
        JobFile.load(file, registry=INSTALLED, overrides=["mesh.tp=2"]).check(6)
    lines = str(caught.value).replace(str(file), "job.yaml").splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["job.yaml:9", "--set mesh.tp", "job.yaml:11"]
    assert caught.value.__notes__[0].startswith(f"to correct it, write in {file}:\n")


@pytest.mark.thorough
@settings(max_examples=60)
@given(
    mesh=st.fixed_dictionaries(
        {}, optional={axis: st.integers(1, 4) for axis in ("pp", "dp_shard", "dp_replicate", "cp", "tp", "ep")}
    ),
    parallel=st.sampled_from([[], ["fsdp"], ["hsdp"], ["replicate"], ["activation_checkpointing"]]),
    pipeline=st.sampled_from([None, "1f1b", "interleaved_1f1b", "dual_pipe_v"]),
    size=st.integers(1, 64),
    microbatch=st.none() | st.integers(1, 8),
    world_size=st.integers(1, 12),
)
def test_the_edit_that_an_error_gives_mends_the_job(
    mesh: Values, parallel: list[str], pipeline: str | None, size: int, microbatch: int | None, world_size: int
) -> None:
    sections: Values = {
        "model": {"name": "toy_model", "blocks": 32},
        "mesh": mesh,
        "parallel": parallel,
        "pipeline": pipeline,
        "batch": {"size": size, "microbatch": microbatch},
    }
    try:
        job(world_size, **sections).check(world_size)
    except D9dError as error:
        if getattr(error, "__notes__", ()):
            job(world_size, **{**sections, **advice(error)}).check(world_size)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_check_says_what_auto_became(small_job: Callable[..., Path], d9d: Callable[..., Any]) -> None:
    path = str(small_job(mesh={"dp_shard": "auto"}, parallel=["fsdp"]))
    status, out, err = d9d("check", path, "--world-size", "2")
    assert (status, err) == (0, "")
    assert "dp_shard=2 (dp_shard is auto: 2)" in out
    assert "one process (dp_shard is auto: 1)" in d9d("check", path)[1]


@pytest.mark.thorough
def test_check_of_several_processes_adds_the_strategy_that_training_would(
    small_job: Callable[..., Path], d9d: Callable[..., Any]
) -> None:
    path = small_job()
    status, out, _ = d9d("explain", str(path), "--world-size", "2")
    assert status == 0
    assert f"{path} has no mesh: dp_shard is 2, with the strategy fsdp, for 2 processes" in out


def test_an_error_of_the_command_line_ends_with_the_edit(
    small_job: Callable[..., Path], d9d: Callable[..., Any]
) -> None:
    path = small_job()
    status, _, err = d9d("train", str(path), "--nproc", "4", "--set", "batch.microbatch=4")
    assert status == 2
    assert err.endswith(f"to correct it, write in {path}:\nbatch: {{size: 4, microbatch: 1}}\n")


def test_nproc_auto_starts_a_process_for_each_device(
    small_job: Callable[..., Path], d9d: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_devices", lambda _name: 3)
    for mesh in ({"dp_shard": "auto"}, None):
        sections = {} if mesh is None else {"mesh": mesh, "parallel": ["fsdp"]}
        status, _, err = d9d("train", str(small_job(**sections)), "--nproc", "auto")
        assert status == 2
        assert "batch.size 4 fits no data-parallel layout of 3 processes" in err


@pytest.mark.full
def test_the_same_file_trains_alike_on_one_process_and_on_two(
    small_job: Callable[..., Path], d9d: Callable[..., Any], tmp_path: Path
) -> None:
    path = str(small_job(batch={"size": 4}))
    assert d9d("train", path, "--set", "run.name=one")[0] == 0
    assert d9d("train", path, "--set", "run.name=two", "--nproc", "2")[0] == 0

    def losses(name: str) -> list[float]:
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]

    assert len(losses("one")) == 4
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
    # A run goes on with any number of processes.
    assert d9d("train", path, "--set", "run.name=two", "--set", "steps=8", "--set", "lr_schedule=null")[0] == 0
    assert len(losses("two")) == 5
