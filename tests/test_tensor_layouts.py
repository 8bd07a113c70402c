"""Tensor parallelism of everything that a Qwen3 can have, its checkpoints in other layouts, and refusals."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core.errors import D9dError
from d9d_testing.layouts import Harness, assert_passed, job_of, topology_here
from d9d_testing.world import RankFailedError, World
from d9d_verify.layouts import Layout
from safetensors.torch import load_file

TP2 = Layout("tp 2", {"tp": 2}, ["tensor_parallel"])
TP4 = Layout("tp 4", {"tp": 4}, ["tensor_parallel"])
SPLIT = Layout("fsdp 2, tp 2", {"dp_shard": 2, "tp": 2}, ["tensor_parallel", "fsdp"])
CAUSAL, TOPIC = {"name": "causal_lm"}, {"name": "token_classification", "num_classes": 3}


def harness(table: ModuleType, corpus: Path, model: dict[str, Any], **sections: Any) -> Harness:
    return Harness(table.job(corpus, "float32", model=table.DENSE | model) | sections, table.PLUGINS, 2)


@pytest.mark.thorough
def test_a_model_with_all_of_it_is_split_as_one_process_computes_it(table: ModuleType, tmp_path: Path) -> None:
    model = {
        "tie_embeddings": True, "attention_bias": True, "sliding_window": 8, "sliding_from_layer": 1,
        "vocab_size": 258, "added_tokens": 3, "num_key_value_heads": 1,
    }  # fmt: skip
    one = table.sized(Layout("reference", {}, ()), 1)
    assert_passed(harness(table, tmp_path / "corpus", model).compare([table.sized(SPLIT, 1)], reference=one))


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [
        {"tie_embeddings": True},
        {"attention_bias": True, "sliding_window": 8, "sliding_from_layer": 1},
        {"vocab_size": 258, "added_tokens": {"first": 2, "second": 1}},
        {"vocab_size": 258, "added_tokens": 3, "tie_embeddings": True},
        {"num_key_value_heads": 1},
    ],
    ids=["tied", "biases and windows", "added tokens", "added tokens, tied", "one key/value head"],
)
def test_every_kind_of_model_is_split_as_one_process_computes_it(
    table: ModuleType, tmp_path: Path, model: dict[str, Any]
) -> None:
    made = harness(table, tmp_path / "corpus", model)
    one = table.sized(Layout("reference", {}, ()), 1)
    assert_passed(made.compare([table.sized(layout, 1) for layout in (TP2, TP4, SPLIT)], reference=one))


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        pytest.param("experts", [TP2, SPLIT], marks=pytest.mark.full),
        pytest.param("experts", [TP4], marks=pytest.mark.full),
        pytest.param("dense", [TP2, TP4, SPLIT], marks=pytest.mark.full),
    ],
    ids=["experts", "experts over four", "dense"],
)
def test_low_rank_terms_are_split_with_their_layers(
    table: ModuleType, tmp_path: Path, model: str, layouts: list[Layout]
) -> None:
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE if model == "dense" else table.EXPERTS)
    job |= {"peft": {"name": "lora", "r": 4, "targets": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]}}
    made = Harness(job, (*table.PLUGINS, "d9d_peft.plugin"), 3)
    one = table.sized(Layout("reference", {}, ()), 1)
    assert_passed(made.compare([table.sized(layout, 1) for layout in layouts], reference=one))


TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
DROPOUT = {"name": "lora", "r": 4, "dropout": 0.5, "targets": TARGETS}
METHODS = {
    "lora": {"name": "lora", "r": 4, "targets": TARGETS},
    "dora": {"name": "dora", "r": 4, "targets": TARGETS},
    "ia3": {"name": "ia3", "targets": ["k_proj", "q_proj", "o_proj"], "feedforward": ["down_proj", "up_proj"]},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "layouts"),
    [
        pytest.param("dora", [SPLIT], marks=pytest.mark.full),
        ("ia3", [SPLIT]),
        pytest.param("dora", [TP2, TP4], marks=pytest.mark.full),
        pytest.param("ia3", [TP2, TP4], marks=pytest.mark.full),
    ],
    ids=["dora", "ia3", "dora over two and four", "ia3 over two and four"],
)
def test_magnitudes_and_scales_are_split_with_their_layers(
    table: ModuleType, tmp_path: Path, method: str, layouts: list[Layout]
) -> None:
    """Of layers with biases, too, which a scale of outputs scales once."""
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE | {"attention_bias": True})
    made = Harness(job | {"peft": METHODS[method]}, (*table.PLUGINS, "d9d_peft.plugin"), 3)
    one = table.sized(Layout("reference", {}, ()), 1)
    assert_passed(made.compare([table.sized(layout, 1) for layout in layouts], reference=one))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "layout"),
    [
        pytest.param("lora", TP4, marks=pytest.mark.full),
        ("lora", SPLIT),
        pytest.param("dora", SPLIT, marks=pytest.mark.full),
        pytest.param("ia3", SPLIT, marks=pytest.mark.full),
    ],
    ids=["lora over four", "lora", "dora", "ia3"],
)
def test_terms_are_merged_for_an_export_as_one_process_does(
    table: ModuleType, tmp_path: Path, method: str, layout: Layout
) -> None:
    job = table.job(tmp_path / "corpus", "float32") | {
        "export": True,
        "steps": 2,
        "batch": {"size": 4, "microbatch": 2},
    }
    job |= {"peft": METHODS[method]}
    written = {}
    for name, one in (("alone", Layout("alone", {}, ())), ("split", layout)):
        values = job | {"mesh": dict(one.mesh), "parallel": list(one.parallel)}
        values["run"] = {"dir": str(tmp_path / "runs"), "name": name}
        World(one.ranks).run(build, values, [*table.PLUGINS, "d9d_peft.plugin"])
        written[name] = load_file(tmp_path / "runs" / name / "model" / "model.safetensors")
    assert written["split"].keys() == written["alone"].keys()
    for name, tensor in written["alone"].items():
        torch.testing.assert_close(written["split"][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [(TP2, TP4), (SPLIT, TP2), (TP4, SPLIT)], ids=lambda layout: layout.name)
def test_a_run_goes_on_in_another_layout(table: ModuleType, tmp_path: Path, first: Layout, second: Layout) -> None:
    job = table.job(tmp_path / "corpus", "float32") | {"lr_schedule": None}
    made = Harness(job, table.PLUGINS, steps=4)
    layouts = [table.sized(layout, 1) for layout in (first, second, Layout("reference", {}, ()))]
    assert_passed([made.compare_resumed(*layouts)])


ONE_GRAPH = {"name": "compile", "backend": "aot_eager", "fullgraph": True}
OVERLAPPED = {"name": "tensor_parallel", "asynchronous": True}
ALL_OF_IT = {"attention_bias": True, "num_key_value_heads": 1, "tie_embeddings": True}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "dtype", "ranks", "sections"),
    [
        (ALL_OF_IT, "float32", 2, {}),
        pytest.param(ALL_OF_IT, "float32", 4, {}, marks=pytest.mark.full),
        pytest.param({}, "bfloat16", 4, {}, marks=pytest.mark.full),
        pytest.param({}, "bfloat16", 2, {"pipeline": "zb1p"}, marks=pytest.mark.full),
        pytest.param("experts", "float32", 2, {"pipeline": "zb1p"}, marks=pytest.mark.full),
        pytest.param("experts", "bfloat16", 4, {}, marks=pytest.mark.full),
        *(
            pytest.param(ALL_OF_IT, "float32", ranks, {"peft": METHODS[name]}, marks=pytest.mark.full)
            for name, ranks in (("lora", 2), ("lora", 4), ("dora", 2), ("dora", 4), ("ia3", 4))
        ),
        *(
            pytest.param({}, "float32", 2, sections, marks=pytest.mark.full)
            for sections in (
                {"peft": METHODS["lora"], "pipeline": "zb1p"},
                {"precision": {"parameters": "float32", "autocast": "bfloat16"}},
                {"parallel": ["activation_checkpointing"]},
                {"parallel": [{"name": "compile", "backend": "aot_eager"}]},
            )
        ),
    ],
)  # fmt: skip
def test_what_overlaps_with_products_computes_what_waits_for_them(
    table: ModuleType, tmp_path: Path, model: Any, dtype: str, ranks: int, sections: dict[str, Any]
) -> None:
    values = table.job(
        tmp_path / "corpus", dtype, model=table.EXPERTS if model == "experts" else table.DENSE | dict(model)
    )
    besides = list(sections.get("parallel", ()))
    mesh = {"tp": ranks} | ({"pp": 2} if "pipeline" in sections else {})
    values |= {name: value for name, value in sections.items() if name != "parallel"}
    made = Harness(values, (*table.PLUGINS, "d9d_peft.plugin"), 3)
    waiting, overlapped = (
        table.sized(Layout(name, mesh, [strategy, *besides]), 2)
        for name, strategy in (("waiting", "tensor_parallel"), ("overlapped", OVERLAPPED))
    )
    assert_passed(made.compare([overlapped], reference=waiting))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (2, ["tensor_parallel"]),
        pytest.param(4, ["tensor_parallel", "activation_checkpointing"], marks=pytest.mark.full),
        pytest.param(2, [OVERLAPPED, "activation_checkpointing"], marks=pytest.mark.full),
    ],
    ids=["waiting", "checkpointed over four", "overlapped, checkpointed"],
)
def test_terms_drop_what_one_process_drops(
    table: ModuleType, tmp_path: Path, ranks: int, strategies: list[Any]
) -> None:
    """Row-wise layers have other features on each rank, which drop independently; column-wise ones have the same."""
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE) | {"peft": DROPOUT}
    made = Harness(job, (*table.PLUGINS, "d9d_peft.plugin"), 3)
    one = table.sized(Layout("reference", {}, ()), 2)
    assert_passed(made.compare([table.sized(Layout("split", {"tp": ranks}, strategies), 2)], reference=one))


@pytest.mark.full
def test_a_run_with_dropout_goes_on_in_another_layout(table: ModuleType, tmp_path: Path) -> None:
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE) | {"peft": DROPOUT, "lr_schedule": None}
    made = Harness(job, (*table.PLUGINS, "d9d_peft.plugin"), steps=4)
    layouts = [table.sized(layout, 2) for layout in (TP2, TP4, Layout("reference", {}, ()))]
    assert_passed([made.compare_resumed(*layouts)])


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "sections"),
    [("tensor_parallel", {}), (OVERLAPPED, {}), (OVERLAPPED, {"peft": METHODS["dora"]})],
    ids=["waiting", "overlapped", "overlapped, with magnitudes"],
)
def test_checkpointed_blocks_are_one_graph_each(
    table: ModuleType, tmp_path: Path, strategy: Any, sections: dict[str, Any]
) -> None:
    """The reference is not compiled: what measures it draws numbers inside of its forward, which no graph can hold."""
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE) | sections
    made = Harness(job, (*table.PLUGINS, "d9d_peft.plugin"), 2)
    compiled = Layout("compiled", {"tp": 2}, [strategy, "activation_checkpointing", ONE_GRAPH])
    assert_passed(made.compare([table.sized(compiled, 2)], reference=table.sized(TP2, 2)))


@pytest.mark.thorough
def test_a_job_says_which_products_overlap(table: ModuleType, tmp_path: Path) -> None:
    """In row-wise layers with a LoRA update, only the product between its factors waits."""
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE)
    job |= {"mesh": {"tp": 2}, "parallel": [OVERLAPPED]}
    job |= {"peft": {"name": "lora", "r": 4, "targets": ["q_proj", "down_proj"]}}
    made = job_of(job, [*table.PLUGINS, "d9d_peft.plugin"]).plan().collectives.entries
    kinds = {entry.collective.module: entry.collective.kind for entry in made if entry.collective.module}
    assert kinds["layers.0.attention"] == kinds["layers.0.attention.o_proj"] == "all_to_all"
    assert kinds["layers.0.ffn"] == "all_to_all"
    assert kinds["layers.0.ffn.down_proj"] == "all_to_all"
    assert kinds["layers.0.ffn.down_proj.lora_A"] == "reduce_scatter"


@pytest.mark.thorough
def test_a_job_for_gpus_of_one_node_lists_symmetric_memory_instead_of_all_to_alls(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that LoRA matrices read too are exchanged in turns in the backward."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE) | {"mesh": {"tp": 2}, "parallel": [OVERLAPPED]}
    job |= {"device": "cuda", "peft": {"name": "lora", "r": 4, "targets": ["q_proj"]}}

    def listed() -> dict[str, str]:
        made = job_of(job, [*table.PLUGINS, "d9d_peft.plugin"]).plan().collectives.entries
        return {one.purpose: one.kind for entry in made if (one := entry.collective).group == "tp"}

    found, through = listed(), "through symmetric memory"
    assert found[f"hidden states at layers.0.attention, {through}, forward"] == "all_gather"
    assert found["hidden states at layers.0.attention, reduce_scatter in turns, backward"] == "all_to_all"
    assert found[f"hidden states at layers.0.ffn, {through}, backward"] == "reduce_scatter"
    assert found[f"hidden states at layers.0.ffn.down_proj, {through}, backward"] == "all_gather"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not any(through in purpose for purpose in listed())


def refused(table: ModuleType, tmp_path: Path, layout: Layout, **sections: Any) -> str:
    model = sections.pop("model", {})
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE | model)
    values = job | {"mesh": dict(layout.mesh), "parallel": list(layout.parallel), **sections}
    with pytest.raises((D9dError, RankFailedError)) as caught:
        World(layout.ranks).run(build, values, list(table.PLUGINS))
    return str(caught.value)


def build(values: dict[str, Any], plugins: list[str]) -> None:
    job = job_of(values, plugins)
    job.build(lambda _: None, topology_here(job)).train()


@pytest.mark.thorough
def test_heads_that_ranks_can_neither_share_nor_repeat_are_refused(table: ModuleType, tmp_path: Path) -> None:
    three = Layout("tp 3", {"tp": 3}, ["tensor_parallel"])
    assert "mesh.tp is 3, which does not divide the 4 query heads" in refused(table, tmp_path, three)
    heads = {"num_attention_heads": 6, "head_dim": 8}
    said = refused(table, tmp_path, three, model=heads)
    assert "the 2 heads of 'layers.0.attention.k_proj' can be neither split evenly over 3 ranks nor repeated" in said


def test_features_that_ranks_cannot_share_are_refused(table: ModuleType, tmp_path: Path) -> None:
    said = refused(table, tmp_path, TP2, model={"intermediate_size": 49})
    assert "mesh.tp is 2, which does not divide the 49 features of 'layers.0.ffn.gate_proj'" in said


@pytest.mark.thorough
@pytest.mark.parametrize("model", [{}, {"vocab_size": 258, "added_tokens": 3}], ids=["plain", "added tokens"])
def test_positions_that_ranks_cannot_share_are_refused(
    table: ModuleType, tmp_path: Path, model: dict[str, Any]
) -> None:
    odd = {"name": "text", "sources": [str(tmp_path / "corpus")], "sequence_length": 23}
    said = refused(table, tmp_path, TP2, model=model, data=odd, steps=1)
    assert "parallel[0]: strategy 'tensor_parallel' splits positions over 2 ranks" in said
    assert "sequence lengths are 23 (data.sequence_length); use 22 or 24" in said
    said = refused(table, tmp_path, TP2, model=model, evaluation={"every": 1, "sets": {"odd": odd}}, steps=1)
    assert "sequence lengths are 23 (evaluation.sets.odd.sequence_length); use 22 or 24" in said


def copied_and_given_a_wrong_token(values: dict[str, Any], plugins: list[str]) -> None:
    job = job_of(values, plugins)
    stage = job.build(lambda _: None, topology_here(job)).stage
    copy, tokens = deepcopy(stage), torch.arange(8).view(2, 4)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
        assert copy(tokens=tokens)["logits"].any()
        assert not stage(tokens=tokens)["logits"].any()
        tokens[1, 2] = values["model"]["vocab_size"]
        stage(tokens=tokens)


@pytest.mark.thorough
def test_copies_of_a_stage_compute_with_their_own_parameters_and_tokens_that_are_no_words_are_refused(
    table: ModuleType, tmp_path: Path
) -> None:
    job = table.job(tmp_path / "corpus", "float32") | {"mesh": {"tp": 2}, "parallel": ["tensor_parallel"]}
    with pytest.raises(RankFailedError, match="token id 257 is not in the vocabulary of 257 ids"):
        World(2).run(copied_and_given_a_wrong_token, job, list(table.PLUGINS))


METHOD = """
from typing import Literal
import torch
from d9d_core.config import PluginConfig
from d9d_core.plugin import PeftSpec, Ref, hookimpl

class SecretConfig(PluginConfig):
    name: Literal["secret"] = "secret"

class Secret:
    def __init__(self, config):
        pass
    def inject(self, stage):
        stage.get_submodule("layers.0.attention.q_proj").secret = torch.nn.Linear(2, 2, device="meta")
        return frozenset({"layers.0.attention.q_proj.secret.weight"})
    def merge(self, stage):
        pass

@hookimpl
def d9d_peft_methods():
    yield PeftSpec(name="secret", summary="Adds a layer.", config=Ref(f"{__name__}:SecretConfig"),
                   build=Ref(f"{__name__}:Secret"))
"""


def test_what_nobody_said_how_to_split_is_refused(table: ModuleType, tmp_path: Path) -> None:
    plugin = tmp_path / "secret.py"
    plugin.write_text(METHOD)
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE)
    values = job | {"mesh": {"tp": 2}, "parallel": ["tensor_parallel"], "peft": "secret"}
    with pytest.raises(D9dError, match=r"the style of 'layers.0.attention.q_proj.secret.weight' over tp is unknown"):
        job_of(values, [*table.PLUGINS, str(plugin)]).plan()
