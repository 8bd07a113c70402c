"""Predicted memory of small stages, with numbers that can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from d9d_core.cost import AttentionShape, BlockCost, OpCost, StageCost, StrategyCost
from d9d_core.job_file.job import Mesh
from d9d_planner.costs.update import Update
from d9d_planner.layout import DataGroups, Layout
from d9d_planner.live import Moment
from d9d_planner.memory import Memory, MemoryModel
from d9d_planner.network import Group

ONE = Group(1)


class Work:
    """Stand-in of a workload: parameters of 4 bytes, gradients of 2 bytes, computation in ``width`` bytes."""

    def __init__(self, effect: StrategyCost, groups: DataGroups, width: int = 2, hosts: Sequence[int] = (0,)) -> None:
        self.effect, self.group, self.width, self.host = effect, groups, width, list(hosts)
        self.gradient_width, self.parameter_width = 2, 4
        self.update = Update()
        self.job = SimpleNamespace(precision=SimpleNamespace(autocast=None))
        self.moment: list[list[Moment]] = []

    def strategy(self, _layout: object) -> StrategyCost:
        return self.effect

    def groups(self, _layout: object) -> DataGroups:
        return self.group

    def compute_width(self, _effect: object) -> int:
        return self.width

    def updates(self, _layout: object) -> Any:
        return SimpleNamespace(of=lambda _blocks: self.update)

    def hosts(self, _layout: object) -> list[int]:
        return self.host

    def moments(self, _layout: object) -> list[list[Moment]]:
        return self.moment


def groups(shards: Group = ONE, replicas: Group = ONE, experts: Group = ONE) -> DataGroups:
    return DataGroups(shards, replicas, experts, ONE)


FSDP = StrategyCost(shards=True, gathers="twice", reduces="each")
GIB = 2**30
EMBEDDING = BlockCost("e", (), parameters=10, is_block=False)
HEAD = BlockCost("h", (OpCost("head", "product", kept=50.0),), parameters=4, is_block=False, workspace=7.0)


def layer(count: int = 2, workspace: float = 30.0, experts: int = 0, **more: Any) -> BlockCost:
    op = OpCost("x", "product", flops=1, backward_flops=1, kept=100.0)
    return BlockCost("b", (op,), 8, experts, input=20.0, workspace=workspace, count=count, **more)


def memory(
    *blocks: BlockCost,
    effect: StrategyCost | None = None,
    graded: frozenset[int] = frozenset(),
    held: int = 1,
    of: DataGroups | None = None,
    microbatches: int = 1,
    mesh: Mapping[str, int] | None = None,
    autocast: bool = False,
    update: Update | None = None,
) -> tuple[Memory, MemoryModel]:
    sizes = Mesh(**(mesh or {}))
    layout = Layout(sizes, (), None, microbatches * sizes.data_parallel_size, 1)
    load = Work(effect or StrategyCost(), of or groups())
    load.update = update or Update(state=12.0, workspace=5.0)
    load.moment = [[Moment(((0, held),), 0, graded)]]
    load.job.precision.autocast = "bfloat16" if autocast else None
    made = MemoryModel(cast("Any", load), layout, [StageCost(blocks, boundary=9.0)])
    (found, *_) = made.ranks()
    return found, made


def expected(**parts: float) -> Memory:
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "workspace", "communication")
    values = {name: float(parts.get(name, 0.0)) for name in names}
    axes = parts.get("axes", 0)
    return Memory(**values, outside=(0.7 + 0.25 * axes) * GIB, fragmentation=0.04 * sum(values.values()))


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        # At the heads: all activations and logits, and the workspace of the head.
        ({}, {"activations": 200, "logits": 50, "workspace": 7}),
        ({"held": 3}, {"activations": 600, "logits": 150, "workspace": 7}),
        ({"graded": frozenset({0})}, {"gradients": 60, "activations": 200, "logits": 50, "workspace": 7}),
        # In the largest block: gradients of the head exist, logits are freed.
        ({"workspace": 300.0}, {"gradients": 8, "activations": 200, "workspace": 300}),
        ({"workspace": 300.0, "graded": frozenset({0})}, {"gradients": 60, "activations": 200, "workspace": 300}),
        # In the first block, recomputed: all gradients but the embedding's; only its input is left.
        ({"effect": StrategyCost(recomputed=1.0)}, {"gradients": 40, "activations": 20, "workspace": 130}),
        ({"autocast": True}, {"activations": 200, "logits": 50, "workspace": 7 + 60}),
        # Tensors that strategies keep: 4 bytes, and two copies of 4 bytes, for each trained parameter.
        (
            {"effect": StrategyCost(state=4.0, copies=2)},
            {"activations": 200, "logits": 50, "workspace": 7, "optimizer": 12 + 30 * 12},
        ),
    ],
)
def test_the_memory_of_a_backward_is_that_of_its_fullest_point(given: dict[str, Any], parts: dict[str, float]) -> None:
    block = layer(workspace=given.pop("workspace", 30.0))
    found, _ = memory(EMBEDDING, block, HEAD, **given)
    parts = {"parameters": 120, "optimizer": 12, **parts}
    assert found == expected(**parts)
    assert found.allocated == pytest.approx(sum(parts.values()))
    assert found.needed - found.outside == pytest.approx(found.allocated * 1.04)
    assert found.outside == 0.7 * GIB


def test_all_gradients_may_need_more_than_the_activations_before() -> None:
    head = BlockCost("h", (OpCost("head", "product", kept=5.0),), parameters=4, is_block=False)
    op = OpCost("x", "product", backward_flops=1, kept=1.0)
    found, _ = memory(EMBEDDING, BlockCost("b", (op,), 8, count=2), head, update=Update())
    assert found == expected(parameters=120, gradients=60)
    found, _ = memory(EMBEDDING, BlockCost("b", (op,), 8, count=2), head, update=Update(), held=2)
    assert found == expected(parameters=120, gradients=60, activations=2, logits=5)


def test_the_block_with_the_largest_workspace_counts_and_the_first_keeps_its_input() -> None:
    blocks = [layer(1, workspace=400.0), layer(1, workspace=900.0), layer(1, workspace=500.0)]
    found, _ = memory(EMBEDDING, *blocks, HEAD)
    assert found == expected(parameters=152, optimizer=12, gradients=8, activations=300, workspace=900)
    norm = BlockCost("n", (), parameters=3, is_block=False)
    found, _ = memory(EMBEDDING, norm, layer(), HEAD, effect=StrategyCost(recomputed=1.0))
    assert found == expected(parameters=132, optimizer=12, gradients=46, activations=20, workspace=130)


def test_a_stage_that_begins_with_a_block_has_all_its_gradients_in_that_block() -> None:
    found, _ = memory(layer(), HEAD, effect=StrategyCost(recomputed=1.0))
    assert found == expected(parameters=80, optimizer=12, gradients=40, activations=20, workspace=130)


ATTENDS = OpCost("a", "attention", backward_flops=1, kept=10.0, attention=AttentionShape(1, 1, 1, 1, 2))


@pytest.mark.parametrize(
    ("recomputed", "parts"),
    [
        # Blocks keep an input of 20 and outputs of 6 for attention, and recompute the other 110 - 6.
        (1.0, {"gradients": 40, "activations": 26, "workspace": 30 + 104}),
        # Half of the blocks keep 110, so memory peaks earlier, in the last block.
        (0.5, {"gradients": 8, "activations": 2 * (55 + 13), "workspace": 30 + 104}),
    ],
)
def test_recomputed_blocks_may_keep_the_outputs_of_attention(recomputed: float, parts: dict[str, float]) -> None:
    block = layer()
    block = replace(block, ops=(*block.ops, ATTENDS))
    found, _ = memory(EMBEDDING, block, HEAD, effect=StrategyCost(recomputed=recomputed, keeps_attention=True))
    assert found == expected(parameters=120, optimizer=12, **parts)


def test_a_block_without_backward_is_not_recomputed() -> None:
    block = replace(layer(1), ops=(OpCost("x", "product", flops=1, kept=100.0),))
    found, _ = memory(EMBEDDING, block, HEAD, effect=StrategyCost(recomputed=1.0))
    assert found == expected(parameters=88, optimizer=12, activations=20, logits=50, workspace=7)


@pytest.mark.parametrize(
    ("effect", "parameters", "trained"),
    [
        # 10 + 2 x (8 + 16) + 4 parameters; without the frozen ones, 10 + 2 x (5 + 10) + 4.
        (StrategyCost(), 62, 44),
        # Half of them, and a quarter of the experts.
        (StrategyCost(shards=True), 5 + 8 + 2 + 8, 5 + 5 + 2 + 5),
    ],
)
def test_experts_are_counted_with_their_own_shards_and_without_the_frozen_ones(
    effect: StrategyCost, parameters: int, trained: int
) -> None:
    blocks = (EMBEDDING, layer(2, 300.0, experts=16, frozen=3, frozen_experts=6), HEAD)
    found, _ = memory(*blocks, effect=effect, of=groups(Group(2), ONE, Group(4)), graded=frozenset({0}))
    parts = {"parameters": parameters * 4, "gradients": trained * 2}
    assert found == expected(**parts, optimizer=12, activations=200, workspace=300)


def test_gradients_of_other_stages_are_held_during_a_backward() -> None:
    load = Work(StrategyCost(recomputed=1.0), groups(), hosts=[0, 0])
    load.update, load.moment = Update(state=12.0), [[Moment(((0, 1), (1, 1)), 0, frozenset({1}))]]
    norm = BlockCost("n", (), parameters=1, is_block=False)
    stages = [StageCost((EMBEDDING, layer(), norm)), StageCost((layer(1), HEAD))]
    (found,) = MemoryModel(cast("Any", load), Layout(Mesh(), (), None, 2, 1), stages).ranks()
    # Gradients of 12 parameters of the other stage, and of 27 without the embedding's 10 of this one.
    assert found == expected(
        parameters=(27 + 12) * 4, optimizer=24, gradients=(12 + 17) * 2, activations=20 + 20, logits=50, workspace=130
    )


def test_all_gradients_of_a_stage_may_come_on_top_of_those_of_other_stages() -> None:
    load = Work(StrategyCost(), groups(), hosts=[0, 0])
    load.update, load.moment = Update(state=12.0), [[Moment(((0, 1), (1, 1)), 0, frozenset({1}))]]
    small = BlockCost("b", (OpCost("x", "product", backward_flops=1, kept=1.0),), 8, count=2)
    stages = [StageCost((EMBEDDING, small)), StageCost((layer(1), HEAD))]
    (found,) = MemoryModel(cast("Any", load), Layout(Mesh(), (), None, 2, 1), stages).ranks()
    parts = {"gradients": (26 + 12) * 2, "activations": 100, "logits": 50}
    assert found == expected(parameters=(26 + 12) * 4, optimizer=24, **parts)


@pytest.mark.parametrize(("shards", "parameters"), [(False, 62), (True, 5 + 8 + 2 + 8)])
def test_autocast_copies_the_whole_parameters_and_experts(shards: bool, parameters: int) -> None:
    blocks = (EMBEDDING, layer(2, experts=16), HEAD)
    of = groups(Group(2), ONE, Group(4))
    found, _ = memory(*blocks, effect=StrategyCost(shards=shards), of=of, autocast=True)
    parts = {"parameters": parameters * 4, "workspace": 7 + 62 * 2}
    assert found == expected(**parts, optimizer=12, activations=200, logits=50)


def test_the_update_may_need_more_than_a_backward() -> None:
    found, _ = memory(EMBEDDING, layer(), HEAD, update=Update(state=12.0, workspace=900.0))
    assert found == expected(parameters=120, gradients=60, optimizer=12, workspace=900)


@pytest.mark.parametrize(
    ("effect", "microbatches", "communication"),
    [
        # Of blocks of 8 + 16 parameters, two are gathered, with 14 outside of blocks, in 2 bytes; one is reduced.
        (FSDP, 1, (14 + 48) * 2 + 24 * 2),
        (FSDP | StrategyCost(reduce_width=4), 1, (14 + 48) * 2 + 24 * 4),
        (StrategyCost(shards=True, gathers="once", reduces="each"), 1, (14 + 72) * 2 + 24 * 2),
        (StrategyCost(shards=True, gathers="twice", reduces="last"), 1, (14 + 48) * 2 + 24 * 2),
        (StrategyCost(shards=True, gathers="twice", reduces="last"), 2, (14 + 48) * 2 + (14 + 72) * 2),
        (StrategyCost(shards=True), 1, 0),
    ],
)
def test_gathered_parameters_and_their_gradients_need_memory(
    effect: StrategyCost, microbatches: int, communication: float
) -> None:
    found, made = memory(
        EMBEDDING, layer(3, experts=16), HEAD, effect=effect, of=groups(Group(2), ONE, Group(4)),
        microbatches=microbatches, mesh={"dp_shard": 4},
    )  # fmt: skip
    # Half of 10 + 3 x 8 + 4, and a quarter of 3 x 16 parameters.
    assert found == expected(
        parameters=(19 + 12) * 4, optimizer=12, activations=300, logits=50, workspace=7, axes=1,
        communication=communication,
    )  # fmt: skip
    assert made.least() == 31 * 4 + 12 + communication + 350
    assert found.allocated == 31 * 4 + 12 + 300 + 50 + 7 + communication


@pytest.mark.parametrize(("frozen", "communication"), [(0, (14 + 48) * 2 + 24 * 2), (20, (14 + 48) * 2 + 14 * 2)])
def test_the_largest_block_is_gathered_and_the_largest_trained_one_is_reduced(
    frozen: int, communication: float
) -> None:
    # Blocks of 8 and 2, 16 or 4 parameters; without the frozen ones, the 14 outside of blocks are the most.
    large = layer(1, experts=16, frozen=frozen - min(frozen, 16), frozen_experts=min(frozen, 16))
    blocks = [EMBEDDING, layer(1, experts=2), large, layer(1, experts=4), HEAD]
    found, _ = memory(*blocks, effect=FSDP, of=groups(Group(2)), mesh={"dp_shard": 2})
    assert found.communication == communication


@pytest.mark.parametrize(
    ("blocks", "communication"),
    [
        # 33 of a block's 48 parameters are trained; without blocks, only the others are gathered.
        ((EMBEDDING, layer(1, experts=40, frozen=6, frozen_experts=9), HEAD), (14 + 2 * 48) * 2 + 33 * 2),
        ((EMBEDDING, HEAD), 14 * 2 + 14 * 2),
        ((replace(EMBEDDING, frozen=10), replace(HEAD, frozen=4)), 14 * 2),
        ((replace(EMBEDDING, parameters=100), layer(1), HEAD), (104 + 2 * 8) * 2 + 104 * 2),
    ],
)
def test_two_blocks_are_gathered_beside_the_parameters_outside_of_blocks(
    blocks: tuple[BlockCost, ...], communication: float
) -> None:
    found, _ = memory(*blocks, effect=FSDP, of=groups(Group(2)), mesh={"dp_shard": 2})
    assert found.communication == communication


def test_offloaded_parameters_need_no_memory_and_frozen_ones_no_gradients() -> None:
    found, made = memory(EMBEDDING, layer(), HEAD, effect=FSDP | StrategyCost(offloads=True), of=groups(Group(2)))
    assert (found.parameters, found.gradients, found.optimizer) == (0.0, 0.0, 0.0)
    assert made.least() == (14 + 16) * 2 + 14 * 2 + 250
    frozen, _ = memory(EMBEDDING, layer(workspace=300.0, frozen=8), HEAD, graded=frozenset({0}))
    assert frozen.gradients == (10 + 4) * 2


def test_pipeline_ranks_hold_the_tensors_between_stages() -> None:
    load = Work(StrategyCost(), groups(), hosts=[0, 1, 0])
    load.moment = [[Moment(((0, 2), (2, 1)), 2, frozenset()), Moment(((0, 1),), 0, frozenset())],
                   [Moment(((1, 1),), 1, frozenset())]]  # fmt: skip
    layout = Layout(Mesh(pp=2), (), None, 4, 1)
    stages = [StageCost((layer(count),), boundary=float(count)) for count in (1, 2, 3)]
    made = MemoryModel(cast("Any", load), layout, stages)
    first, second = made.ranks()
    assert (first.parameters, second.parameters) == (4 * 8 * 4, 2 * 8 * 4)
    assert (first.activations, second.activations) == (2 * 100 + 300, 200)
    assert (first.communication, second.communication) == (6.0, 4.0)
    assert first.workspace == 30.0
    assert first.outside == (0.7 + 0.25) * GIB
    assert made.least() == 3 * 8 * 4 + load.update.state + 2 * 3.0 + 300  # of the largest stage alone
