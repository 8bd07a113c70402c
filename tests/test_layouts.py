"""Every layout computes what one process does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_testing.layouts import Harness, assert_passed
from d9d_verify.compare import Verdict
from d9d_verify.layouts import Layout

SLOW = pytest.mark.slow
IN_BOTH_DTYPES = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "count"),
    [("float32", 3), *(pytest.param(*rest, marks=SLOW) for rest in (("float32", 1), ("bfloat16", 1), ("bfloat16", 3)))],
)
def test_every_layout_computes_what_one_process_does(table: ModuleType, tmp_path: Path, dtype: str, count: int) -> None:
    rows = table.run(tmp_path / "corpus", dtypes=[dtype], counts=[count])
    assert len(rows) == 22
    assert [(v.layout, v.diverged) for _, _, v in rows if not v.passed] == []
    shown = [row for row in _shown(table, "dense") if row[:2] == [dtype, str(count)]]
    assert shown == _rows(rows), _STALE


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "spread"),
    [("float32", True), pytest.param("float32", False, marks=SLOW), pytest.param("bfloat16", None, marks=SLOW)],
    ids=["float32 spread", "float32 in place", "bfloat16"],
)
def test_experts_compute_what_one_process_does_wherever_they_are(
    table: ModuleType, tmp_path: Path, dtype: str, spread: bool | None
) -> None:
    layouts = [one for one in table.EXPERT_LAYOUTS if spread is None or ("ep" in one.mesh) == spread]
    rows = table.run_experts(tmp_path / "corpus", layouts=layouts, dtypes=[dtype])
    assert len(rows) == {True: 16, False: 7, None: 23}[spread]
    assert [(count, v.layout, v.diverged) for _, count, v in rows if not v.passed] == []
    names = {layout.name for layout in layouts}
    shown = [row for row in _shown(table, "experts") if row[0] == dtype and row[2] in names]
    assert shown == _rows(rows), _STALE


_STALE = "docs/layouts.json has other rows; run tools/layout_table.py"


@pytest.mark.thorough
@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.full)], ids=["dense", "experts"])
def test_layouts_with_each_pair_of_axes_and_strategies_compute_what_one_process_does(
    table: ModuleType, tmp_path: Path, experts: bool
) -> None:
    model, layouts = (table.EXPERTS, table.EXPERT_LAYOUTS) if experts else (table.DENSE, table.LAYOUTS)
    rows = table.run(tmp_path / "corpus", table.pairwise(layouts), ["float32"], [3], model=model)
    assert [(v.layout, v.diverged) for _, _, v in rows if not v.passed] == []


def test_chosen_layouts_have_each_pair_of_axes_and_strategies_that_any_layout_has(table: ModuleType) -> None:
    a, b, c = (Layout(str(axes), axes, parallel) for axes, parallel in (
        ({"tp": 2}, ["x"]), ({"tp": 2, "cp": 2}, ["x", "y"]), ({"cp": 2}, [{"name": "x", "method": "m"}]),
    ))  # fmt: skip
    assert table.pairwise([a, b, c]) == [b, c]
    assert table.pairwise([a]) == [a]
    assert {axis for one in table.pairwise(table.LAYOUTS) for axis in one.mesh} == {
        "dp_replicate", "dp_shard", "cp", "tp"
    }  # fmt: skip
    assert len(table.pairwise(table.LAYOUTS)) < len(table.LAYOUTS)


def _rows(rows: list[Any]) -> list[list[str]]:
    return [[dtype, str(count), v.layout] for dtype, count, v in rows]


def _shown(table: ModuleType, part: str) -> list[list[str]]:
    return [[row["parameters"], row["microbatches"], row["layout"]] for row in table.recorded()[part]]


def test_the_records_have_these_layouts_only_and_the_page_their_largest_deviations(table: ModuleType) -> None:
    assert len(_shown(table, "dense")) == 2 * 2 * 22
    assert len(_shown(table, "experts")) == 2 * 23
    assert table.PAGE.read_text("utf-8") == table.page(table.recorded()), _STALE


def test_the_records_of_a_layout_are_merged_to_its_largest_deviations(table: ModuleType) -> None:
    def verdict(loss: float, update: float) -> Verdict:
        return Verdict("tp 2", loss, 0.0, (0.0, ""), (0.0, ""), (update, ""), None)

    rows = [
        ("float32", 1, verdict(1e-3, 2e-3)),
        ("bfloat16", 1, verdict(0.5, 0.5)),
        ("float32", 3, verdict(2e-3, 1e-3)),
    ]
    first, second = table.merged(rows)
    assert (first["microbatches"], first["loss"], first["update"]) == ("1, 3", 2e-3, 2e-3)
    assert (second["parameters"], second["loss"]) == ("bfloat16", 0.5)
    parts = {part: [first] for part in table.PARTS}
    assert table.summary(parts).count("| float32 | 1 | 2.0e-03 | 0.0e+00 | 0.0e+00 | 0.0e+00 | 2.0e-03 |") == 4


@pytest.mark.full
@IN_BOTH_DTYPES
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "glm", "gemma 2", "gemma 3", "qwen3_5"])
def test_further_families_compute_what_one_process_does(
    table: ModuleType, tmp_path: Path, family: str, dtype: str
) -> None:
    model, corpus = table.FAMILIES[family], tmp_path / "corpus"
    with_context = "cp 4, ulysses" if "score_softcap" in model else "cp 2, ring, tp 2"
    names = {"tp 4", "hsdp 2 x 2, tp 2", with_context}
    chosen = [layout for layout in table.of_family(family) if layout.name in names]
    rows = table.run(corpus, chosen, [dtype], [3], model=model)
    rows += table.run_pipelines(
        corpus, [table.Piped("zb1p", 2, 3, tied=model.get("tie_embeddings", False), model=model)], dtype
    )
    assert len(rows) == 4
    assert [(v.layout, v.diverged) for _, _, v in rows if not v.passed] == []


#: Layouts of gpt-oss that divide the sinks of heads, the biases of experts, and windows in each way that differs.
_OF_GPT_OSS = (
    Layout("replicate 2", {"dp_replicate": 2}, ["replicate"]),
    Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"]),
    Layout("fsdp 2, ep 2", {"dp_shard": 2, "ep": 2}, ["fsdp", "expert_parallel"]),
    Layout(
        "fsdp 2, ep 2, separate", {"dp_shard": 2, "ep": 2}, ["fsdp", {"name": "expert_parallel", "combine": "separate"}]
    ),
    Layout("tp 2", {"tp": 2}, ["tensor_parallel"]),
    Layout("cp 2, ring", {"cp": 2}, [{"name": "context_parallel", "method": "ring"}]),
    Layout("cp 2, ulysses", {"cp": 2}, [{"name": "context_parallel", "method": "ulysses"}]),
    Layout("cp 2, all_gather", {"cp": 2}, [{"name": "context_parallel", "method": "all_gather"}]),
    Layout("cp 4, hybrid", {"cp": 4}, [{"name": "context_parallel", "method": "hybrid", "head_ranks": 2}]),
    Layout(
        "fsdp 2, cp 2, ring, tp 2, ep 4",
        {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
        [{"name": "context_parallel", "method": "ring"}, "tensor_parallel", "fsdp", "expert_parallel"],
    ),
)


@pytest.mark.full
@IN_BOTH_DTYPES
def test_gpt_oss_computes_what_one_process_does(table: ModuleType, tmp_path: Path, dtype: str) -> None:
    model, corpus = table.GPT_OSS, tmp_path / "corpus"
    if dtype == "bfloat16":  # else the last bit of an activation changes which experts a token gets
        model = model | {"experts_per_token": model["num_experts"]}
    rows = table.run(corpus, _OF_GPT_OSS, [dtype], [3], model=model)
    piped = [table.Piped("1f1b", 2, 3, model=model), table.Piped("zb1p", 2, 3, table.EXPERT_LAYOUTS[5], model=model)]
    rows += table.run_pipelines(corpus, piped, dtype)
    assert len(rows) == len(_OF_GPT_OSS) + len(piped)
    assert [(v.layout, v.diverged) for _, _, v in rows if not v.passed] == []


@pytest.mark.full
@IN_BOTH_DTYPES
def test_experts_between_layers_of_gated_deltanet_compute_what_one_process_does(
    table: ModuleType, tmp_path: Path, dtype: str
) -> None:
    model, corpus = table.HYBRID_EXPERTS, tmp_path / "corpus"
    names = {"fsdp 4, ep 2, checkpointed", "tp 2, ep 2", "fsdp 2, cp 2, ring, ep 4", "cp 2, all_gather, tp 2, ep 4"}
    chosen = [layout for layout in table.EXPERT_LAYOUTS if layout.name in names]
    rows = table.run(corpus, chosen, [dtype], [3], model=model)
    mixed = Layout(
        "fsdp 2, cp 2, tp 2", {"dp_shard": 2, "cp": 2, "tp": 2}, ["tensor_parallel", table.context("ring"), "fsdp"]
    )
    rows += table.run_pipelines(
        corpus, [table.Piped("1f1b", 2, 3, mixed, model=model | {"num_layers": 4, "vocab_size": 264})], dtype
    )
    assert len(rows) == 5
    assert [(v.layout, v.diverged) for _, _, v in rows if not v.passed] == []


@pytest.mark.thorough
def test_a_recurrent_layer_is_split_over_heads_and_positions(table: ModuleType, tmp_path: Path) -> None:
    chosen = [layout for layout in table.LAYOUTS if layout.name in {"cp 2, ring", "cp 4, ulysses", "cp 2, ring, tp 2"}]
    rows = table.run(tmp_path / "corpus", chosen, ["float32"], [3], model=table.FAMILIES["qwen3_5"])
    assert [(v.layout, v.diverged) for _, _, v in rows if not v.passed] == []
    assert len(rows) == 3


@pytest.mark.full
def test_a_bfloat16_run_that_changes_its_layout_computes_every_step_as_one_process_does(
    table: ModuleType, tmp_path: Path
) -> None:
    job = table.job(tmp_path / "corpus", "bfloat16") | {"optimizer": {"name": "adamw", "lr": 0.01}}
    harness = Harness(job, table.PLUGINS, steps=8)
    shards, copies = (table.sized(layout, 3) for layout in (table.LAYOUTS[3], table.LAYOUTS[1]))
    assert_passed([harness.compare_resumed(shards, copies, table.sized(Layout("reference", {}, ()), 3))])
