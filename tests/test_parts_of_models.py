"""Strategies for parts of a model: ``match``, several entries of one strategy, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_core.errors import D9dError
from d9d_testing.layouts import Harness, assert_passed, job_of, topology_here
from d9d_testing.world import RankFailedError, World
from d9d_verify.layouts import Layout

FSDP_AND_REPLICAS = [{"name": "replicate", "match": ["embedding", "heads"]}, {"name": "fsdp", "match": ["layers.*"]}]
INNER = [
    {"name": "fsdp", "match": ["*.attention"], "defer": "everything"},
    {"name": "fsdp", "match": ["*.ffn", "heads"], "reshard_after_forward": False},
]


def harness(table: ModuleType, corpus: Path, model: dict[str, Any], **sections: Any) -> Harness:
    return Harness(table.job(corpus, "float32", model=model) | sections, table.PLUGINS, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)], ids=["tied", "untied"])
def test_parts_of_a_dense_model_are_computed_as_in_one_process(table: ModuleType, tmp_path: Path, tied: bool) -> None:
    layouts = [
        Layout("sharded layers", {"dp_shard": 2}, FSDP_AND_REPLICAS),
        Layout("two entries in each block", {"dp_shard": 2}, INNER),
        Layout("feed-forwards over tp", {"tp": 2}, [{"name": "tensor_parallel", "match": ["*.ffn"]}]),
        Layout(
            "a layer and the vocabulary over tp", {"tp": 2},
            [{"name": "tensor_parallel", "match": ["layers.0", "embedding", "heads"]}],
        ),
        Layout("an embedding over tp", {"tp": 2}, [{"name": "tensor_parallel", "match": ["*.attention", "embedding"]}]),
        Layout(
            "layers of one stage", {"pp": 2},
            [{"name": "replicate", "match": ["layers.0"], "compute_dtype": "float32"}],
            overrides=("pipeline=1f1b",),
        ),
    ]  # fmt: skip
    made = harness(table, tmp_path / "corpus", table.DENSE | {"tie_embeddings": tied})
    assert_passed(made.compare([sized(table, layout) for layout in layouts], reference=one(table)))


@pytest.mark.thorough
def test_experts_of_one_layer_are_spread(table: ModuleType, tmp_path: Path) -> None:
    spread = {"name": "expert_parallel", "match": ["layers.1"]}
    separate = {"name": "expert_parallel", "match": ["layers.0.*"], "combine": "separate"}
    layouts = [
        Layout("one layer", {"dp_shard": 2, "ep": 2}, [spread, "fsdp"]),
        Layout("two entries", {"dp_shard": 2, "ep": 2}, [spread, separate, {"name": "fsdp", "match": ["layers.1"]}]),
    ]
    made = harness(table, tmp_path / "corpus", table.EXPERTS)
    assert_passed(made.compare([sized(table, layout) for layout in layouts], reference=one(table)))


@pytest.mark.full
def test_parts_are_mixed_over_four_axes(table: ModuleType, tmp_path: Path) -> None:
    mesh = {"pp": 2, "dp_shard": 2, "tp": 2}
    parts = [
        {"name": "tensor_parallel", "match": ["*.attention", "heads"]},
        {"name": "expert_parallel", "match": ["layers.0"]},
        {"name": "fsdp", "match": ["layers.*"]},
        {"name": "replicate", "match": ["embedding", "norm"]},
    ]
    made = harness(table, tmp_path / "corpus", table.EXPERTS)
    layout = Layout("parts", {**mesh, "ep": 2}, parts, overrides=("pipeline=zb1p",))
    assert_passed(made.compare([sized(table, layout, 2)], reference=one(table)))


@pytest.mark.parametrize(
    ("mesh", "parallel", "error"),
    [
        (
            {"dp_shard": 2}, [{"name": "fsdp", "match": ["layers.0.attn"]}],
            r"strategy 'fsdp': the pattern 'layers.0.attn' in 'match' matches no module; modules with similar names: "
            "layers.0",
        ),
        (
            {"dp_shard": 2}, [{"name": "fsdp", "match": ["layers.*"]}, {"name": "replicate", "match": ["*.ffn"]}],
            r"parallel\[0\] \(fsdp\) and parallel\[1\] \(replicate\) both act on layers.0.ffn; give each entry",
        ),
        (
            {"dp_shard": 2}, ["fsdp", {"name": "fsdp", "match": ["layers.0"]}],
            r"parallel\[0\] \(fsdp\) and parallel\[1\] \(fsdp\) both act on layers.0;",
        ),
        (
            {"dp_shard": 2}, ["fsdp", {"name": "replicate", "match": ["heads"]}],
            r"parallel\[0\]: strategy 'fsdp' .*conflicts with 'strategy:replicate'",
        ),
        (
            {"dp_shard": 2}, [*FSDP_AND_REPLICAS, {"name": "fsdp", "match": ["norm"], "compute_dtype": "bfloat16"}],
            r"compute_dtype is bfloat16, but 'embedding.weight' is computed in another format",
        ),
        (
            {"dp_shard": 2, "dp_replicate": 2},
            [{"name": "replicate", "match": ["heads"], "offload": True}, {"name": "fsdp", "match": ["layers.*"]}],
            r"strategy 'replicate' with 'match' supports only the further field 'defer' if mesh.dp_shard",
        ),
        (
            {"tp": 2}, [{"name": "tensor_parallel", "match": ["layers.0.attention.q_proj"]}],
            r"'match' matches 'layers.0.attention.q_proj', which cannot be split alone; match 'layers.0.attention'",
        ),
        (
            {"tp": 2}, [{"name": "tensor_parallel", "match": ["norm"]}],
            r"'match' matches 'norm', which cannot be split alone; remove the pattern",
        ),
        (
            {"tp": 2}, [{"name": "tensor_parallel", "match": [f"layers.{layer}"]} for layer in range(2)],
            r"'tensor_parallel' stands twice in 'parallel', but it also splits the sequence",
        ),
    ],
    ids=[
        "no module", "overlap", "overlap with the whole", "conflict with the whole", "one format", "replicas of shards",
        "a projection", "a norm", "twice",
    ],
)  # fmt: skip
def test_parts_that_cannot_be_are_refused(
    table: ModuleType, tmp_path: Path, mesh: dict[str, int], parallel: list[Any], error: str
) -> None:
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE | {"tie_embeddings": True})
    with pytest.raises(D9dError, match=error):
        job_of(job | {"mesh": mesh, "parallel": parallel}, table.PLUGINS).plan()


def test_check_finds_a_pattern_that_matches_no_module_of_any_stage(table: ModuleType, tmp_path: Path) -> None:
    def plan(pattern: str) -> None:
        parallel = [{"name": "fsdp", "match": ["embedding", pattern]}]
        made = job | {"mesh": {"pp": 2, "dp_shard": 2}, "parallel": parallel, "pipeline": "1f1b"}
        job_of(made, table.PLUGINS).plan()

    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE)
    plan("layers.1")  # in the second stage only
    with pytest.raises(D9dError, match=r"the pattern 'layers.7' in 'match' matches no module"):
        plan("layers.7")


def sized(table: ModuleType, layout: Layout, microbatches: int = 1) -> Layout:
    fixed = table.sized(layout, microbatches)
    return replace(fixed, overrides=(*fixed.overrides, *layout.overrides))


def one(table: ModuleType) -> Layout:
    return table.sized(Layout("reference", {}, ()), 1)  # type: ignore[no-any-return]


def build(values: dict[str, Any], plugins: list[str]) -> None:
    job = job_of(values, plugins)
    job.build(topology=topology_here(job))


@pytest.mark.full
def test_rows_that_ranks_cannot_share_evenly_are_refused(table: ModuleType, tmp_path: Path) -> None:
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE)
    layout = {"mesh": {"dp_shard": 4, "tp": 2}, "parallel": ["tensor_parallel", "fsdp"]}
    values = job | layout | {"run": {"dir": str(tmp_path)}, "batch": {"size": 4}}
    with pytest.raises(RankFailedError, match=r"has 257 rows, which 4 x 2 ranks .*choose 264 rows"):
        World(8).run(build, values, list(table.PLUGINS))
