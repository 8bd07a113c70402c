"""A rank and the driver of a run, over stand-ins of Ray's modules."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_engine.supervision.failure import Failure
from d9d_ray import driver, worker
from d9d_ray.causes import Causes, all_causes
from d9d_ray.order import POINTER, STOP, TRAINS, Order


def order_in(folder: Path, **changes: Any) -> Order:
    fields: dict[str, Any] = {
        "name": "a", "job": "", "options": [], "folder": str(folder), "working_directory": str(folder), "processes": 6,
        "resources": {"CPU": 1.0}, "restarts": 3, "startup": 1, "address": "auto", "export": [],
    }  # fmt: skip
    return Order(**fields | changes)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Install the stand-ins; this process is the fourth of six ranks on two machines."""
    found = SimpleNamespace(init={}, trainer={}, shut=0, fit=lambda: None)
    context = SimpleNamespace(
        get_world_rank=lambda: found.rank, get_world_size=lambda: 6, get_local_world_size=lambda: 3,
        get_node_rank=lambda: found.rank // 3, get_local_rank=lambda: found.rank % 3,
    )  # fmt: skip
    found.rank = 4

    def broadcast(value: Any) -> Any:
        assert (value is not None) == (found.rank == 0)
        return value or ["10.0.0.1", 5]

    class Trainer:
        def __init__(self, function: Any, **options: Any) -> None:
            assert function is worker.train_rank
            found.trainer = options

        def fit(self) -> Any:
            return found.fit()

    def shutdown() -> None:
        found.shut += 1

    plain = ("CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig")
    modules: dict[str, dict[str, Any]] = {
        "ray": {
            "init": lambda **options: found.init.update(options),
            "shutdown": shutdown,
            "util": SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        },
        "ray.train": {"get_context": lambda: context, **{name: lambda **options: options for name in plain}},
        "ray.train.collective": {"broadcast_from_rank_zero": broadcast},
        "ray.train.v2": {},
        "ray.train.v2.api": {},
        "ray.train.v2.api.data_parallel_trainer": {"DataParallelTrainer": Trainer},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return found


# --- a rank


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of the submission; the directory and the levels of loggers, which a rank changes, are restored."""
    monkeypatch.chdir(tmp_path)
    levels = {logger: logger.level for logger in map(logging.getLogger, (None, "ray.train"))}
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"
    for logger, level in levels.items():
        logger.setLevel(level)


def test_a_rank_knows_its_place_and_forgets_its_failure_in_an_earlier_start(
    ray: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def train(order: Order, env: Any, causes: Causes) -> int:
        seen.append((env, Path.cwd(), (folder / TRAINS).exists(), all_causes(folder)))
        return 0

    monkeypatch.setattr(worker, "_train", train)
    Causes(folder, 4).failed(Failure("lost", 1))
    for ray.rank in (4, 0):
        assert worker.train_rank(asdict(order_in(folder))) == 0
    (env, place, trains, causes), (first, _, first_trains, _) = seen
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (4, 6, 1, 3)
    assert (env.node_rank, env.num_nodes, env.master) == (1, 2, ("10.0.0.1", 5))
    assert (place, trains, causes) == (folder, False, [])
    assert (first.node_rank, first.num_nodes) == (0, 2)
    assert first.master[0] == "127.0.0.1"
    assert first.master[1] > 1023  # a free port that needs no rights
    assert first_trains  # rank 0 says that the run trains
    assert not (folder / TRAINS).exists()
    assert {logging.getLogger(name).level for name in (None, "ray.train")} == {logging.WARNING}


def test_machines_are_counted_by_the_last_of_them_if_they_have_different_numbers_of_ranks(
    ray: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(
        get_world_rank=lambda: 5, get_world_size=lambda: 6, get_local_world_size=lambda: 4,
        get_node_rank=lambda: 2, get_local_rank=lambda: 0,
    )  # fmt: skip
    seen: list[Any] = []
    monkeypatch.setattr(sys.modules["ray.train"], "get_context", lambda: context)
    monkeypatch.setattr(worker, "_train", lambda order, env, causes: seen.append(env) or 0)
    ray.rank = 5
    worker.train_rank(asdict(order_in(folder)))
    assert [(env.node_rank, env.num_nodes, env.local_world_size) for env in seen] == [(2, 3, 4)]


def test_a_stop_that_was_not_asked_for_is_a_preemption(
    ray: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_train", lambda *_: 75)
    with pytest.raises(worker.PreemptedError, match="Ray takes a machine away"):
        worker.train_rank(asdict(order_in(folder)))
    (folder / STOP).touch()
    assert worker.train_rank(asdict(order_in(folder))) == 75


def test_only_failures_that_a_restart_may_repair_are_raised(
    ray: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [RuntimeError("reset"), DataError("record 7 is damaged")]

    def train(*_: Any) -> int:
        raise errors[0]

    ray.rank = 0
    monkeypatch.setattr(worker, "_train", train)
    with pytest.raises(RuntimeError, match="reset"):
        worker.train_rank(asdict(order_in(folder)))
    assert not (folder / TRAINS).exists()
    del errors[0]
    assert worker.train_rank(asdict(order_in(folder))) == 2
    errors[0] = AssertionError("no rank trains again")
    assert worker.train_rank(asdict(order_in(folder))) == 2


def test_a_save_is_reported_by_all_ranks_and_its_place_by_the_first(
    ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[tuple[dict[str, Any], Any]] = []
    train = sys.modules["ray.train"]
    kept = SimpleNamespace(from_directory=lambda folder: json.loads((Path(folder) / POINTER).read_text()))
    vars(train).update(Checkpoint=kept, report=lambda values, checkpoint=None: reports.append((values, checkpoint)))
    values = {"step": 4, "checkpoint": "/runs/a/step-4", "loss": 2.5}
    for ray.rank in (0, 1):
        worker._report(values)
    assert reports == [(values, {"step": 4, "checkpoint": "/runs/a/step-4"}), (values, None)]


# --- the driver


@pytest.mark.parametrize("resources", [{"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}])
def test_the_driver_asks_ray_for_the_workers_of_the_order(
    ray: SimpleNamespace, folder: Path, resources: dict[str, float]
) -> None:
    ray.fit = lambda: SimpleNamespace(return_value=0, metrics={"step": 8})
    order = order_in(folder, resources=resources, export=["TOKEN", "ABSENT"])
    assert driver._run(order, {"TOKEN": "x"}, lambda: None) == (0, "", 8)
    assert ray.init == {"address": "auto", "runtime_env": {"env_vars": {"TOKEN": "x"}}}
    assert ray.trainer["train_loop_config"] == order.values()
    assert ray.trainer["scaling_config"] == {
        "num_workers": 6, "resources_per_worker": resources, "use_gpu": "GPU" in resources,
    }  # fmt: skip
    run = ray.trainer["run_config"]
    assert run["name"].startswith("a-2")
    assert (run["storage_path"], run["failure_config"]) == (str(folder / "ray"), {"max_failures": 3})
    assert run["checkpoint_config"] == {"num_to_keep": 1}
    assert ray.shut == 1


def test_the_driver_says_how_the_run_ended(ray: SimpleNamespace, folder: Path) -> None:
    def ended(value: Any) -> tuple[int, str, int | None]:
        def fit() -> Any:
            if isinstance(value, Exception):
                raise value
            return SimpleNamespace(return_value=value, metrics=None)

        ray.fit = fit
        return driver._run(order_in(folder), os.environ, lambda: None)

    assert ended(75) == (75, "", None)
    assert ended(None)[:2] == (1, "the training function returned no status")
    assert ended(driver.CancelledError("cancelled while it waited")) == (75, "cancelled while it waited", None)
    assert ended(RuntimeError("no worker"))[0] == 1
    Causes(folder, 0).failed(Failure("record 7 is damaged", 2))
    status, cause, _ = ended(RuntimeError("a worker died"))
    assert status == 2
    assert "record 7 is damaged" in cause
    status, cause, _ = ended(2)
    assert (status, "record 7 is damaged" in cause) == (2, True)
    assert ray.shut == 6


def test_without_ray_the_driver_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    status, cause, _ = driver._run(order_in(folder), {}, lambda: None)
    assert status == 2
    assert "pip install 'ray[train]" in cause
