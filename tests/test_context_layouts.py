"""Context parallelism of everything that a Qwen3 can have, that no document leaks, and refusals."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core.errors import D9dError
from d9d_engine.distributed.positions import ZigzagPositions
from d9d_testing.layouts import Harness, assert_passed, job_of, topology_here
from d9d_testing.world import RankFailedError, World
from d9d_verify.layouts import Layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed as dist

METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "ulysses": (2, {"method": "ulysses"}),
    "all_gather": (2, {"method": "all_gather"}),
    "ring": (2, {"method": "ring"}),
    "hybrid": (4, {"method": "hybrid", "head_ranks": 2}),
}
#: Method and window whose documents are kept apart in every run of the tests; the others in thorough ones.
OFTEN = (("all_gather", None), ("ring", 7))


def layout(name: str, *others: Any, **mesh: int) -> Layout:
    ranks, fields = METHODS[name]
    return Layout(f"cp {ranks}, {name}", {"cp": ranks, **mesh}, [{"name": "context_parallel", **fields}, *others])


def harness(table: ModuleType, corpus: Path, model: dict[str, Any], **sections: Any) -> Harness:
    return Harness(table.job(corpus, "float32", model=table.DENSE | model) | sections, table.PLUGINS, 2)


# --- no token sees another document

#: Lengths of documents, which are repeated until a sample is full.
packings = st.lists(st.integers(1, 20), min_size=1, max_size=8)
SAMPLES, LENGTH = 4, 32


def numbered(lengths: list[int]) -> list[int]:
    """Number of the document of each position."""
    found: list[int] = []
    while len(found) < LENGTH:
        found += [len(set(found))] * lengths[len(set(found)) % len(lengths)]
    return found[:LENGTH]


def changed(values: dict[str, Any], plugins: list[str], packed: list[list[list[int]]], place: int) -> list[Any]:
    """Positions of each sample whose loss another token at a place changes, of this rank's."""
    job = job_of(values, plugins)
    topology = topology_here(job)
    stage = job.build(lambda _: None, topology).stage.eval()
    share = ZigzagPositions(topology.sizes["cp"], topology.coordinate["cp"])
    places = share.own(torch.arange(LENGTH).unsqueeze(0))[0]
    found = []
    for samples in packed:
        documents = torch.tensor(samples)
        starts = [[row.index(number) for number in row] for row in samples]
        positions = torch.arange(LENGTH) - torch.tensor(starts)
        tokens = torch.randint(0, 256, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(place))
        blocks = tokens % 3 - 1  # equal numbers in several documents
        losses = []
        for more in (0, 1):
            tokens[:, place] += more
            inputs = {"tokens": share.own(tokens), "positions": share.own(positions), "targets": share.own(tokens)}
            if values["model"].get("attention_mask") == "blocks":
                inputs["attention_blocks"] = blocks
            with torch.no_grad():
                losses.append(stage(**inputs, documents=documents)["token_loss"])
        differ = [[int(places[column]) for column in row.nonzero()[:, 0]] for row in losses[0] != losses[1]]
        found.append(differ)
    dist.barrier()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "window", "mask"),
    [
        pytest.param(name, window, mask, marks=() if (name, window) in OFTEN else pytest.mark.full)
        for name in METHODS
        for window in (None, 7)
        for mask in ("causal", "blocks")
    ],
)
def test_another_token_changes_its_own_document_only(
    table: ModuleType, tmp_path: Path, name: str, window: int | None, mask: str
) -> None:
    one = layout(name)
    model = table.DENSE | ({} if window is None else {"sliding_window": window, "sliding_from_layer": 0})
    model |= {"attention_mask": mask}
    values = table.job(tmp_path / "corpus", "float32", model=model)
    values |= {"mesh": dict(one.mesh), "parallel": list(one.parallel)}
    values["data"] = values["data"] | {"sequence_length": LENGTH}

    @settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
    @given(
        packed=st.lists(st.lists(packings, min_size=SAMPLES, max_size=SAMPLES), min_size=4, max_size=8),
        place=st.integers(0, LENGTH - 1),
    )
    def holds(packed: list[list[list[int]]], place: int) -> None:
        numbers = [[numbered(lengths) for lengths in samples] for samples in packed]
        of_ranks = World(one.ranks).run(changed, values, list(table.PLUGINS), numbers, place)
        for batch, rows in enumerate(numbers):
            for sample, row in enumerate(rows):
                moved = {position for of_rank in of_ranks for position in of_rank[batch][sample]}
                first = place if mask == "causal" else 0  # later keys of a block are seen, too
                allowed = {there for there in range(first, LENGTH) if row[there] == row[place]}
                assert place in moved
                assert moved <= allowed, (row, place, moved - allowed)

    holds()


# --- memory


def kept(values: dict[str, Any], plugins: list[str]) -> int:
    """Bytes that a forward keeps for its backward, besides parameters, masks and tensors of whole samples."""
    job = job_of(values, plugins)
    topology = topology_here(job)
    stage = job.build(lambda _: None, topology).stage
    share = ZigzagPositions(topology.sizes["cp"], topology.coordinate["cp"])
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    places = torch.arange(64).expand(2, 64)
    inputs = {"tokens": share.own(tokens), "positions": share.own(places), "targets": share.own(tokens)}
    owned = {parameter.data_ptr() for parameter in stage.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in owned and tensor.dtype != torch.bool:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = stage(**inputs, documents=torch.zeros(2, 64, dtype=torch.int64))
    assert outputs["token_loss"].requires_grad
    dist.barrier()
    return sum(found.values())


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "most"), [("ring", 0.52), ("ulysses", 0.58), ("all_gather", 0.6), ("hybrid", 0.27)])
def test_what_a_forward_keeps_falls_with_the_number_of_ranks(
    table: ModuleType, tmp_path: Path, name: str, most: float
) -> None:
    one = layout(name)
    values = table.job(tmp_path / "corpus", "float32", model=table.DENSE | {"max_positions": 64})
    alone = World(1).run(kept, values, list(table.PLUGINS))[0]
    shared = World(one.ranks).run(
        kept, values | {"mesh": dict(one.mesh), "parallel": list(one.parallel)}, list(table.PLUGINS)
    )
    assert max(shared) < most * alone, [bytes_ / alone for bytes_ in shared]


# --- models


@pytest.mark.thorough
def test_a_model_with_all_of_it_is_shared_as_one_process_computes_it(table: ModuleType, tmp_path: Path) -> None:
    model = {
        "tie_embeddings": True, "attention_bias": True, "sliding_window": 8, "sliding_from_layer": 1,
        "vocab_size": 258, "added_tokens": 3, "num_key_value_heads": 1,
    }  # fmt: skip
    one = table.sized(Layout("reference", {}, ()), 1)
    layouts = [table.sized(layout(name), 1) for name in ("ulysses", "all_gather", "ring")]
    layouts.append(table.sized(layout("ring", "tensor_parallel", tp=2), 1))
    assert_passed(harness(table, tmp_path / "corpus", model).compare(layouts, reference=one))


@pytest.mark.full
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_low_rank_terms_see_a_rank_s_positions(table: ModuleType, tmp_path: Path, model: str) -> None:
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE if model == "dense" else table.EXPERTS)
    job |= {"peft": {"name": "lora", "r": 4, "targets": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]}}
    made = Harness(job, (*table.PLUGINS, "d9d_peft.plugin"), 3)
    one = table.sized(Layout("reference", {}, ()), 1)
    assert_passed(made.compare([table.sized(layout(name), 1) for name in ("ring", "hybrid")], reference=one))


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [("ring", "ulysses"), ("all_gather", "hybrid")])
def test_a_run_goes_on_with_another_method_and_alone(
    table: ModuleType, tmp_path: Path, first: str, second: str
) -> None:
    job = table.job(tmp_path / "corpus", "float32") | {"lr_schedule": None}
    made = Harness(job, table.PLUGINS, steps=4)
    reference = table.sized(Layout("reference", {}, ()), 1)
    layouts = [table.sized(one, 1) for one in (layout(first, "fsdp"), layout(second))]
    assert_passed([made.compare_resumed(*layouts, reference), made.compare_resumed(layouts[1], reference, reference)])


def drawn(values: dict[str, Any], plugins: list[str]) -> list[float]:
    """Number that a rank's model draws in each forward of a step."""
    job = job_of(values, plugins)
    trainer = job.build(lambda _: None, topology_here(job))
    found: list[float] = []
    trainer.stage.register_forward_hook(lambda *_: found.append(float(torch.rand(()))))
    trainer.train()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_ranks_draw_for_their_own_positions(table: ModuleType, tmp_path: Path, axis: str) -> None:
    strategy = {"cp": "context_parallel", "tp": "tensor_parallel"}[axis]
    values = table.job(tmp_path / "corpus", "float32") | {"mesh": {axis: 2}, "parallel": [strategy], "steps": 1}
    first, second = World(2).run(drawn, values, list(table.PLUGINS))
    assert first
    if axis == "cp":  # so that no two positions of a sample share a dropout
        assert not {*first} & {*second}
    else:  # which compute parts of the same positions
        assert first == second


# --- refusals


def refused(table: ModuleType, tmp_path: Path, one: Layout, **sections: Any) -> str:
    model = sections.pop("model", {})
    job = table.job(tmp_path / "corpus", "float32", model=table.DENSE | model)
    values = job | {"mesh": dict(one.mesh), "parallel": list(one.parallel), **sections}
    with pytest.raises((D9dError, RankFailedError)) as caught:
        World(one.ranks).run(build, values, list(table.PLUGINS))
    return str(caught.value)


def build(values: dict[str, Any], plugins: list[str]) -> None:
    job = job_of(values, plugins)
    job.build(lambda _: None, topology_here(job)).train()


@pytest.mark.thorough
def test_lengths_that_ranks_cannot_share_are_refused(table: ModuleType, tmp_path: Path) -> None:
    data = {"name": "text", "sources": [str(tmp_path / "corpus")], "sequence_length": 26}
    said = refused(table, tmp_path, layout("ring"), data=data, steps=1)
    assert "mesh.cp: 2 ranks split each sample into two chunks each, but sequence lengths are 26" in said
    assert "(data.sequence_length); use 24 or 28, or other sizes of the mesh" in said


@pytest.mark.thorough
def test_positions_that_ranks_of_tp_cannot_share_further_are_refused(table: ModuleType, tmp_path: Path) -> None:
    data = {"name": "text", "sources": [str(tmp_path / "corpus")], "sequence_length": 20}
    one = layout("all_gather", "tensor_parallel", tp=4)
    said = refused(table, tmp_path, one, data=data, steps=1)
    assert "splits positions over 4 ranks, within each of 2 ranks of cp, but sequence lengths are 20" in said
    assert "(data.sequence_length); use 16 or 24" in said


@pytest.mark.thorough
def test_lengths_of_evaluations_that_ranks_cannot_share_are_refused(table: ModuleType, tmp_path: Path) -> None:
    data = {"name": "text", "sources": [str(tmp_path / "corpus")], "sequence_length": 26}
    said = refused(table, tmp_path, layout("ring"), evaluation={"every": 1, "sets": {"odd": data}}, steps=1)
    assert "mesh.cp: 2 ranks split each sample into two chunks each, but sequence lengths are 26" in said
    assert "(evaluation.sets.odd.sequence_length)" in said


@pytest.mark.thorough
def test_evaluated_lengths_that_ranks_of_tp_cannot_share_further_are_refused(table: ModuleType, tmp_path: Path) -> None:
    data = {"name": "text", "sources": [str(tmp_path / "corpus")], "sequence_length": 20}
    one = layout("all_gather", "tensor_parallel", tp=4)
    said = refused(table, tmp_path, one, evaluation={"every": 1, "sets": {"odd": data}}, steps=1)
    assert "splits positions over 4 ranks, within each of 2 ranks of cp, but sequence lengths are 20" in said
    assert "(evaluation.sets.odd.sequence_length)" in said


def test_dynamic_scaling_of_positions_is_refused(table: ModuleType, tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_positions": 8}}
    said = refused(table, tmp_path, layout("ring"), model=scaling)
    assert "model.rope_scaling is dynamic" in said
    assert "choose another scaling, such as yarn" in said


def build_without_split(values: dict[str, Any], plugins: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("d9d_nn.causal_lm.task.CausalLM.split_positions")
        patch.delattr("d9d_nn.text_task.TextTask.split_positions")
        build(values, plugins)


@pytest.mark.thorough
def test_a_task_that_cannot_split_positions_is_refused(table: ModuleType, tmp_path: Path) -> None:
    one = layout("ring")
    values = table.job(tmp_path / "corpus", "float32", model=table.DENSE)
    values |= {"mesh": dict(one.mesh), "parallel": list(one.parallel)}
    text = "mesh.cp is 2, but task 'causal_lm' needs all positions of a sample on one rank"
    with pytest.raises(RankFailedError, match=text):
        World(2).run(build_without_split, values, list(table.PLUGINS))


@pytest.mark.thorough
def test_a_kernel_that_attends_from_all_positions_is_refused(table: ModuleType, tmp_path: Path) -> None:
    said = refused(table, tmp_path, layout("all_gather"), kernels={"attention": "reference"}, steps=1)
    assert "kernels.attention: 'reference' needs queries of all positions of a sample" in said
    said = refused(table, tmp_path, layout("ring"), kernels={"attention": "sdpa"}, steps=1)
    assert "kernels.attention: the job calls no op 'attention'" in said


@pytest.mark.thorough
def test_ranks_without_the_strategy_are_refused(table: ModuleType, tmp_path: Path) -> None:
    said = refused(table, tmp_path, Layout("cp 2", {"cp": 2}, ()))
    assert "mesh.cp is 2, but no component of the job uses that axis; add a strategy for it (context_parallel)" in said


@pytest.mark.thorough
def test_samples_drawn_beside_the_training_are_refused(table: ModuleType, tmp_path: Path) -> None:
    drawn = [{"name": "samples", "every": 1, "prompts": [[1, 2, 3]]}]
    said = refused(table, tmp_path, layout("ring"), subscribers=drawn, steps=1)
    assert "needs full prompts, but mesh.cp is 2" in said
