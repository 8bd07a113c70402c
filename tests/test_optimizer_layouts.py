"""Every optimizer computes the same in each layout as in one process, and goes on in another one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_testing.layouts import Harness, assert_passed
from d9d_verify.layouts import Layout

FSDP2 = Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"])
FSDP4 = Layout("fsdp 4", {"dp_shard": 4}, ["fsdp"])
PP2 = Layout("pp 2", {"pp": 2}, [], ("pipeline=1f1b",))
EXPERTS2 = Layout("fsdp 2, ep 2", {"dp_shard": 2, "ep": 2}, ["fsdp", "expert_parallel"])
ONE = Layout("one process", {}, ())

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam", "lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "lion": {"name": "lion", "lr": 0.001},
    "muon": {"name": "muon", "lr": 0.02},
    "schedule_free": {"name": "schedule_free", "lr": 0.01},
    "ema": {"name": "ema", "decay": 0.5, "of": {"name": "adamw", "lr": 0.01}},
    "torch": {"name": "torch", "target": "torch.optim.RMSprop", "lr": 0.001, "arguments": {"momentum": 0.9}},
}


def harness(table: ModuleType, directory: Path, optimizer: dict[str, Any], steps: int = 2, **sections: Any) -> Harness:
    job = table.job(directory / "corpus", "float32") | {"optimizer": optimizer} | sections
    job.pop("lr_schedule", None)
    return Harness(job, table.PLUGINS, steps=steps)


@pytest.mark.full
def test_muon_computes_what_one_process_does_over_shards_and_stages(table: ModuleType, tmp_path: Path) -> None:
    assert_passed(harness(table, tmp_path, OPTIMIZERS["muon"]).compare([FSDP2, FSDP4, PP2]))


@pytest.mark.slow
def test_muon_computes_what_one_process_does_where_experts_are_spread(table: ModuleType, tmp_path: Path) -> None:
    experts = harness(table, tmp_path, OPTIMIZERS["muon"], model=table.EXPERTS)
    assert_passed(experts.compare([table.sized(EXPERTS2, 1), table.sized(FSDP2, 1)], table.sized(ONE, 1)))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != "muon")]
)
def test_a_run_goes_on_in_another_layout(table: ModuleType, tmp_path: Path, name: str) -> None:
    assert_passed([harness(table, tmp_path, OPTIMIZERS[name]).compare_resumed(FSDP2, PP2)])


@pytest.mark.full
def test_a_run_with_stochastic_rounding_goes_on_in_another_layout(table: ModuleType, tmp_path: Path) -> None:
    optimizer = {"name": "stochastic_adamw", "lr": 0.01, "state_dtype": "parameter"}
    rounded = harness(table, tmp_path, optimizer, precision={"parameters": "bfloat16"})
    assert_passed([rounded.compare_resumed(PP2, FSDP2)])


@pytest.mark.full
def test_a_run_with_master_weights_computes_what_one_process_does_and_goes_on_in_another_layout(
    table: ModuleType, tmp_path: Path
) -> None:
    optimizer = {"name": "adamw", "lr": 0.01, "master_weights": True}
    split = harness(table, tmp_path, optimizer, precision={"parameters": "bfloat16"})
    assert_passed([*split.compare([FSDP2, PP2]), split.compare_resumed(FSDP2, PP2)])
