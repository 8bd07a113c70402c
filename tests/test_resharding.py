"""A run that ended early goes on in any layout: exactly as if undisturbed in its own, within rounding in another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import TrainingError
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.logs import read_log_without_times
from d9d_testing.world import World
from torch import Tensor
from torch import distributed as dist

Write = Callable[..., Path]
PLUGINS = [
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_moe.plugin",
    "d9d_pipeline.plugin", "d9d_qwen3.plugin",
]  # fmt: skip
STEPS, DIES_AT, SAVED_AT = 8, 5, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp2": {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]},
    "fsdp4": {"mesh": {"dp_shard": 4}, "parallel": ["fsdp"]},
    "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "parallel": ["hsdp"]},
    "replicate2": {"mesh": {"dp_replicate": 2}, "parallel": ["replicate"]},
    "fsdp4-ep4": {"mesh": {"dp_shard": 4, "ep": 4}, "parallel": ["fsdp", "expert_parallel"]},
    "fsdp4-ep2": {"mesh": {"dp_shard": 4, "ep": 2}, "parallel": ["fsdp", "expert_parallel"]},
    "pp2-v": {"mesh": {"pp": 2}, "pipeline": "zero_bubble_v"},
    "pp2-uneven": {"mesh": {"pp": 2}, "pipeline": {"name": "1f1b", "layers": [4, 1]}},
    "hsdp-ep2": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "parallel": ["hsdp", "expert_parallel"]},
}


class Died(KeyboardInterrupt):
    """Ends a run at once, as a crash of all ranks would; after other exceptions of a subscriber, ranks save."""


class Observer:
    """Takes down the numbers of every step, and dies at the beginning of one."""

    def __init__(self, dies_at: int | None) -> None:
        self._dies_at = dies_at
        self.numbers: dict[int, tuple[float, float]] = {}

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(ev.StepStarts, self._starts), (ev.StepEnds, self._ends)]

    def _starts(self, event: ev.StepStarts) -> None:
        if event.step == self._dies_at:
            raise Died

    def _ends(self, event: ev.StepEnds) -> None:
        self.numbers[event.step] = (event.result.loss.item(), event.result.grad_norm.item())


def train(jobs: list[tuple[dict[str, Any], int | None]]) -> list[dict[str, Any]]:
    """Run whole jobs one after the other, on every rank of a world: their numbers by step, and what was noted."""
    found = []
    for values, dies_at in jobs:
        job, observer = job_of(values, PLUGINS), Observer(dies_at)
        notes: list[str] = []
        trainer = job.build(notes.append, topology_here(job), observers=[observer])
        if dies_at is None:
            trainer.train()
        else:
            with pytest.raises(TrainingError, match="Died"):
                trainer.train()
            dist.barrier()  # no rank goes on while another one still writes
        found.append({"numbers": observer.numbers, "notes": notes})
    return found


class Runs:
    """Jobs of one directory, which differ in their layout."""

    def __init__(self, write: Write, directory: Path, **common: Any) -> None:
        self._write = write
        self._common = common
        self.directory = directory

    def job(self, name: str, layout: str, **sections: Any) -> dict[str, Any]:
        common: dict[str, Any] = {"steps": STEPS, "batch": {"size": 8, "microbatch": 2}, "logging": {"every": 3}}
        common |= self._common | {"export": False, "trackers": [{"name": "jsonl", "picture": False}]}
        path = self._write(name, **(common | LAYOUTS[layout] | sections))
        values: dict[str, Any] = json.loads(path.read_text())
        return values

    def resumed(self, part: str, layout: str) -> tuple[dict[str, Any], None]:
        """A copy of a run that died, to go on in this layout."""
        name = f"{part}-{layout}"
        shutil.copytree(self.directory / part, self.directory / name)
        return self.job(name, layout), None

    def log(self, name: str) -> list[dict[str, float]]:
        return read_log_without_times(self.directory / name)

    def saved(self, name: str) -> dict[str, Tensor]:
        """All tensors of the last checkpoint, in full, in any layout."""
        checkpoint = CheckpointStore(self.directory / name / "checkpoints").newest(pytest.fail)
        assert checkpoint is not None
        assert checkpoint.step == STEPS
        table = checkpoint.manifest["tensors"].items()
        whole = {key: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for key, entry in table}
        checkpoint.load_into(whole)
        return whole


@pytest.fixture
def runs(small_job: Write, tmp_path: Path) -> Runs:
    return Runs(small_job, tmp_path / "runs")


def assert_goes_on(runs: Runs, name: str, result: Mapping[str, Any], undisturbed: Mapping[int, Any]) -> None:
    """A resumed run computes the rest of the undisturbed curve within the rounding of float32."""
    assert any(note.startswith(f"resumed at step {SAVED_AT} of {STEPS}") for note in result["notes"])
    assert list(result["numbers"]) == list(range(SAVED_AT, STEPS))
    for step, numbers in result["numbers"].items():
        assert numbers == pytest.approx(undisturbed[step], rel=2e-5), f"{name}, step {step + 1}"
    for line, expected in zip(runs.log(name), runs.log("straight"), strict=True):
        assert line == pytest.approx(expected, rel=2e-5)
    weights, expected_weights = runs.saved(name), runs.saved("straight")
    assert weights.keys() == expected_weights.keys()
    for key, expected_weight in expected_weights.items():
        error = (weights[key].double() - expected_weight).norm() / expected_weight.double().norm()
        assert error < 1e-5, f"{name}: {key} is off by {error:.1e}"


@pytest.mark.full
@pytest.mark.smoke
def test_a_run_of_four_shards_goes_on_in_any_other_layout(world: type[World], runs: Runs) -> None:
    ((straight, *_),) = world(1).run(train, [(runs.job("straight", "one"), None)])
    part = (runs.job("part", "fsdp4", checkpoint={"every": 2}), DIES_AT)
    world(4).run(train, [part])
    for ranks, layouts in ((4, ["hsdp"]), (2, ["replicate2", "fsdp2"]), (1, ["one"])):
        found = world(ranks).run(train, [runs.resumed("part", layout) for layout in layouts])[0]
        for layout, result in zip(layouts, found, strict=True):
            assert_goes_on(runs, f"part-{layout}", result, straight["numbers"])


@pytest.mark.full
def test_a_run_of_one_process_goes_on_in_four_shards(world: type[World], runs: Runs) -> None:
    part = (runs.job("part", "one", checkpoint={"every": 2}), DIES_AT)
    ((straight, _),) = world(1).run(train, [(runs.job("straight", "one"), None), part])
    ((found, *_), *_) = world(4).run(train, [runs.resumed("part", "fsdp4")])
    assert_goes_on(runs, "part-fsdp4", found, straight["numbers"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp4", marks=pytest.mark.full),
        pytest.param("hsdp", marks=pytest.mark.slow),
        "replicate2",
    ],
)
def test_in_its_own_layout_a_resumed_run_is_the_undisturbed_one_bit_for_bit(
    world: type[World], runs: Runs, layout: str
) -> None:
    # The undisturbed run saves at its end only, so this also shows that asynchronous saves change nothing.
    straight = (runs.job("straight", layout, checkpoint={}), None)
    broken = (runs.job("broken", layout, checkpoint={"every": 2, "asynchronous": True}), DIES_AT)
    again = (broken[0], None)
    results = world(2 if layout == "replicate2" else 4).run(train, [straight, broken, again])
    undisturbed, before, after = (result["numbers"] for result in results[0])
    assert before == {step: undisturbed[step] for step in range(DIES_AT)}
    assert after == {step: undisturbed[step] for step in range(SAVED_AT, STEPS)}
    assert all(result[1]["numbers"] == before for result in results)
    assert runs.log("broken") == runs.log("straight")
    assert [line["step"] for line in runs.log("broken")] == [1, 3, 6, 8]
    assert all("perplexity" in line for line in runs.log("broken"))
    tensors, expected = runs.saved("broken"), runs.saved("straight")
    assert {key.partition("/")[0] for key in expected} == {"model", "optimizer", "metrics"}
    assert tensors.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(tensors[key], expected[key])] == []


@pytest.fixture
def expert_runs(small_job: Write, tmp_path: Path, table: ModuleType) -> Runs:
    model = {**table.EXPERTS, "max_positions": 64}
    return Runs(small_job, tmp_path / "runs", model=model, metrics=["perplexity", "router"])


@pytest.mark.full
def test_a_run_of_experts_goes_on_with_other_expert_groups(world: type[World], expert_runs: Runs) -> None:
    runs = expert_runs
    ((straight, *_),) = world(1).run(train, [(runs.job("straight", "one"), None)])
    world(4).run(train, [(runs.job("part", "fsdp4-ep4", checkpoint={"every": 2}), DIES_AT)])
    for ranks, layouts in ((4, ["hsdp-ep2"]), (1, ["one"])):
        found = world(ranks).run(train, [runs.resumed("part", layout) for layout in layouts])[0]
        for layout, result in zip(layouts, found, strict=True):
            assert_goes_on(runs, f"part-{layout}", result, straight["numbers"])
    assert any("selection_bias" in key for key in runs.saved("straight"))


@pytest.mark.full
def test_a_resumed_run_of_experts_is_the_undisturbed_one_bit_for_bit(world: type[World], expert_runs: Runs) -> None:
    runs = expert_runs
    straight = (runs.job("straight", "fsdp4-ep2", checkpoint={}), None)
    broken = (runs.job("broken", "fsdp4-ep2", checkpoint={"every": 2}), DIES_AT)
    ((undisturbed, _, after), *_) = world(4).run(train, [straight, broken, (broken[0], None)])
    assert after["numbers"] == {step: undisturbed["numbers"][step] for step in range(SAVED_AT, STEPS)}
    assert runs.log("broken") == runs.log("straight")
    tensors, expected = runs.saved("broken"), runs.saved("straight")
    assert [key for key in expected if not torch.equal(tensors[key], expected[key])] == []


@pytest.fixture
def deep_runs(small_job: Write, tmp_path: Path, table: ModuleType) -> Runs:
    """With an embedding that the first stage and the last have in common."""
    model = {**table.DENSE, "max_positions": 64, "num_layers": 5, "tie_embeddings": True}
    return Runs(small_job, tmp_path / "runs", model=model)


@pytest.mark.full
def test_a_run_in_stages_goes_on_in_other_stages_or_in_none(world: type[World], deep_runs: Runs) -> None:
    runs = deep_runs
    ((straight, *_),) = world(1).run(train, [(runs.job("straight", "one"), None)])
    world(2).run(train, [(runs.job("part", "pp2-v", checkpoint={"every": 2}), DIES_AT)])
    for ranks, layouts in ((2, ["fsdp2", "pp2-uneven"]), (1, ["one"])):
        found = world(ranks).run(train, [runs.resumed("part", layout) for layout in layouts])[0]
        for layout, result in zip(layouts, found, strict=True):
            assert_goes_on(runs, f"part-{layout}", result, straight["numbers"])
    assert not any("lm_head" in key for key in runs.saved("part-pp2-uneven"))


@pytest.mark.slow
def test_a_run_in_no_stages_goes_on_in_some(world: type[World], deep_runs: Runs) -> None:
    runs = deep_runs
    part = (runs.job("part", "one", checkpoint={"every": 2}), DIES_AT)
    ((straight, _),) = world(1).run(train, [(runs.job("straight", "one"), None), part])
    ((found, *_), *_) = world(2).run(train, [runs.resumed("part", "pp2-v")])
    assert_goes_on(runs, "part-pp2-v", found, straight["numbers"])


@pytest.mark.parametrize(
    "layout", [pytest.param("pp2-v", marks=pytest.mark.full), pytest.param("pp2-uneven", marks=pytest.mark.slow)]
)
def test_in_its_own_stages_a_resumed_run_is_the_undisturbed_one_bit_for_bit(
    world: type[World], deep_runs: Runs, layout: str
) -> None:
    runs = deep_runs
    straight = (runs.job("straight", layout, checkpoint={}), None)
    broken = (runs.job("broken", layout, checkpoint={"every": 2, "asynchronous": True}), DIES_AT)
    ((undisturbed, _, after), *_) = world(2).run(train, [straight, broken, (broken[0], None)])
    assert after["numbers"] == {step: undisturbed["numbers"][step] for step in range(SAVED_AT, STEPS)}
    assert runs.log("broken") == runs.log("straight")
    tensors, expected = runs.saved("broken"), runs.saved("straight")
    assert tensors.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(tensors[key], expected[key])] == []


def test_only_the_main_rank_writes_logs_and_notes(world: type[World], runs: Runs) -> None:
    first, second = world(2).run(train, [(runs.job("straight", "fsdp2"), None)])
    assert any("checkpoint at step" in note for note in first[0]["notes"])
    assert second[0]["notes"] == []
    assert [line["step"] for line in runs.log("straight")] == [1, 3, 6, 8]  # each once
