"""Fine-tuning methods compute the same in every layout, together with everything that splits or changes a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_testing.layouts import Harness, assert_passed
from d9d_verify.layouts import Layout

PLUGIN = "d9d_peft.plugin"
LORA = {"name": "lora", "r": 4, "alpha": 8}
CHECKPOINTING = "activation_checkpointing"
COMPILE = {"name": "compile", "backend": "aot_eager"}
DATA_PARALLEL = (
    Layout("checkpointed and compiled", {}, [CHECKPOINTING, COMPILE], ("batch.microbatch=4",)),
    Layout("replicate 2", {"dp_replicate": 2}, ["replicate"], ("batch.microbatch=2",)),
    Layout("fsdp 2", {"dp_shard": 2}, ["fsdp", COMPILE], ("batch.microbatch=2",)),
    Layout("fsdp 2, checkpointed", {"dp_shard": 2}, ["fsdp", CHECKPOINTING], ("batch.microbatch=1",)),
)
EXPERTS = (
    Layout("fsdp 2, ep 2", {"dp_shard": 2, "ep": 2}, ["fsdp", "expert_parallel"], ("batch.microbatch=2",)),
    Layout(
        "replicate 2, ep 2", {"dp_replicate": 2, "ep": 2}, ["replicate", "expert_parallel"], ("batch.microbatch=2",)
    ),
)


def piped(schedule: str, mesh: Mapping[str, int], *parallel: str) -> Layout:
    sizes = (f"pipeline.name={schedule}", f"batch.microbatch={2 // mesh.get('dp_shard', 1)}")
    return Layout(f"{schedule} {dict(mesh)}", {"pp": 2, **mesh}, parallel, sizes)


PIPELINES = (piped("1f1b", {}), piped("zb1p", {}), piped("zero_bubble_v", {}), piped("dual_pipe_v", {}))


def harness(table: ModuleType, corpus: Path, model: Mapping[str, Any], peft: Any, dtype: str = "float32") -> Harness:
    values = table.job(corpus, dtype, model=model) | {"peft": peft, "batch": {"size": 8, "microbatch": 8}}
    return Harness(values, [*table.PLUGINS, PLUGIN], 3)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_rank_terms_of_a_dense_model_train_alike_in_data_parallel_layouts(
    table: ModuleType, tmp_path: Path, dtype: str
) -> None:
    assert_passed(harness(table, tmp_path / "corpus", table.DENSE, LORA, dtype).compare(DATA_PARALLEL))


@pytest.mark.full
def test_low_rank_terms_train_alike_in_pipelines_that_split_the_backward(table: ModuleType, tmp_path: Path) -> None:
    model = table.DENSE | {"num_layers": 4, "tie_embeddings": True}
    assert_passed(harness(table, tmp_path / "corpus", model, LORA).compare(PIPELINES))


@pytest.mark.full
def test_low_rank_terms_beside_experts_train_alike_where_experts_are_spread(table: ModuleType, tmp_path: Path) -> None:
    peft = {**LORA, "targets": ["all-linear", "*.experts.gate_proj", "down_proj"]}
    layouts = [*EXPERTS, piped("zb1p", {"dp_shard": 2, "ep": 2}, "fsdp", "expert_parallel")]
    assert_passed(harness(table, tmp_path / "corpus", table.EXPERTS, peft).compare(layouts))


@pytest.mark.full
def test_terms_and_magnitudes_train_alike_in_every_layout(table: ModuleType, tmp_path: Path) -> None:
    layouts = [DATA_PARALLEL[2], piped("zb1p", {})]
    assert_passed(harness(table, tmp_path / "corpus", table.DENSE, {**LORA, "name": "dora"}).compare(layouts))


@pytest.mark.slow
def test_magnitudes_start_alike_where_shards_are_replicated(table: ModuleType, tmp_path: Path) -> None:
    hsdp = Layout("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ["hsdp"], ("batch.microbatch=2",))
    assert_passed(harness(table, tmp_path / "corpus", table.DENSE, {**LORA, "name": "dora"}).compare([hsdp]))


@pytest.mark.full
def test_terms_of_embeddings_and_heads_train_alike_in_every_layout(table: ModuleType, tmp_path: Path) -> None:
    layouts = [DATA_PARALLEL[2], piped("zb1p", {})]
    peft = {**LORA, "targets": ["embedding", "heads.*", "v_proj"]}
    assert_passed(harness(table, tmp_path / "corpus", table.DENSE, peft).compare(layouts))


@pytest.mark.full
def test_learned_scales_train_alike_in_every_layout(table: ModuleType, tmp_path: Path) -> None:
    layouts = [DATA_PARALLEL[2], piped("zb1p", {})]
    assert_passed(harness(table, tmp_path / "corpus", table.DENSE, {"name": "ia3"}).compare(layouts))


@pytest.mark.full
def test_methods_on_one_model_train_alike_in_every_layout(table: ModuleType, tmp_path: Path) -> None:
    methods = [{**LORA, "targets": ["q_proj", "down_proj"]}, {"name": "full_tune", "match": ["norm", "layers.1.ffn.*"]}]
    peft = {"name": "stack", "methods": methods}
    layouts = [DATA_PARALLEL[2], piped("zb1p", {})]
    assert_passed(harness(table, tmp_path / "corpus", table.DENSE, peft).compare(layouts))


@pytest.mark.full
def test_full_tuning_of_some_layers_is_alike_in_every_layout(table: ModuleType, tmp_path: Path) -> None:
    peft = {"name": "full_tune", "match": ["layers.1.*", "norm"]}
    layouts = [DATA_PARALLEL[2], piped("zb1p", {})]
    assert_passed(harness(table, tmp_path / "corpus", table.DENSE, peft).compare(layouts))
