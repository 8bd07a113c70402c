"""Predicted times of small stages, with numbers that can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from d9d_core.cost import AttentionShape, BlockCost, Exchange, OpCost, StageCost, StageTimes, StrategyCost
from d9d_core.errors import JobError
from d9d_core.job_file.job import Mesh
from d9d_planner.costs.update import Update
from d9d_planner.device import Device
from d9d_planner.layout import DataGroups, Layout
from d9d_planner.network import Group
from d9d_planner.step_time import TimeModel

ONE = Group(1)
RATES: dict[str, Any] = {
    "memory_gib": 1, "product": 100, "product_float32": 10, "grouped_product": 50, "attention": 20, "copy_bytes": 8,
    "elementwise_bytes": 4, "node": 8, "link": 2, "network": 1, "link_latency": 0, "network_latency": 0,
    "interference": 0.5, "overhead": 0.25, "launch": 0,
}  # fmt: skip


class Work:
    """Stand-in of a workload: parameters of 4 bytes, gradients of 2 bytes, computation in ``width`` bytes."""

    def __init__(self, effect: StrategyCost, groups: DataGroups, width: int = 2, hosts: Sequence[int] = (0,)) -> None:
        self.effect, self.group, self.width, self.host = effect, groups, width, list(hosts)
        self.gradient_width, self.parameter_width, self.tallies = 2, 4, cast("dict[Any, Any]", {})
        self.update = Update()
        self.simulated: list[Any] = []
        self.fails = False

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

    def programs(self, _layout: object, count: int) -> str:
        return f"programs of {count}"

    def simulator(self, _layout: object) -> Any:
        def simulate(programs: str, times: StageTimes) -> float:
            if self.fails:
                raise ValueError("too few")
            self.simulated.append((programs, times))
            return 100.0

        return simulate


def groups(shards: Group = ONE, replicas: Group = ONE, experts: Group = ONE) -> DataGroups:
    return DataGroups(shards, replicas, experts, ONE)


def model(
    *stages: StageCost,
    effect: StrategyCost | None = None,
    mesh: Mapping[str, int] | None = None,
    of: DataGroups | None = None,
    microbatches: int = 1,
    pipeline: Any = None,
    rates: Mapping[str, Any] | None = None,
    **work: Any,
) -> tuple[TimeModel, Work]:
    sizes = Mesh(**(mesh or {}))
    layout = Layout(sizes, (), pipeline, microbatches * sizes.data_parallel_size, 1)
    load = Work(effect or StrategyCost(), of or groups(), **work)
    return TimeModel(cast("Any", load), layout, list(stages), Device(**{**RATES, **(rates or {})})), load


def parts_of(*blocks: BlockCost, **given: Any) -> dict[str, float]:
    """Parts of a step's time, without those that are zero or idle."""
    parts = model(StageCost(tuple(blocks)), **given)[0].step().parts
    return {name: taken for name, taken in parts.items() if taken and name != "idle"}


PRODUCT = OpCost("p", "product", flops=100, backward_flops=200)
ATTENTION = OpCost("a", "attention", flops=20, backward_flops=60, attention=AttentionShape(1, 1, 1, 1, 2))


def test_an_op_takes_as_long_as_its_products_or_its_traffic() -> None:
    block = BlockCost(
        "b",
        (
            PRODUCT,
            OpCost("t", "product", flops=100, traffic=16, backward_traffic=8),
            OpCost("g", "grouped_product", flops=100, backward_flops=50),
            ATTENTION,
            OpCost("m", "memory", flops=999, traffic=8, backward_traffic=12),
        ),
        count=2,
    )
    # Products: 1 + 2, and 2 + 1 of traffic; experts: 2 + 1; attention: 1 + 3; elementwise: 2 + 3; all twice.
    expected = {"products": 12.0, "experts": 6.0, "attention": 8.0, "elementwise": 10.0}
    assert parts_of(block) == expected
    # In float32, rates of products are a tenth; rates of elementwise ops and of traffic are the same.
    wide = parts_of(block, width=4)
    assert wide == {"products": 2 * (30 + 10 + 1), "experts": 60.0, "attention": 80.0, "elementwise": 10.0}


def test_attention_is_faster_over_longer_samples() -> None:
    """One query head of one feature: 10 rows that read a half of 8,192, 4,096 and 1,024 keys on average."""
    for length, speed in ((8192, 4 / 5 * 3 / 2), (4096, 1.0), (1024, 1 / 3 * 3 / 2)):
        flops = 2 * 10 * length
        shape = AttentionShape(10, 1, 1, 1, 2)
        attention = OpCost("a", "attention", flops=flops, backward_flops=2.5 * flops, attention=shape)
        plain = parts_of(BlockCost("b", (attention,)))["attention"]
        assert parts_of(BlockCost("b", (attention,)), rates={"attention_half": 2048})["attention"] == pytest.approx(
            plain / speed
        )
    alone = OpCost("a", "attention", flops=20)  # without a shape, the length is unknown
    assert parts_of(BlockCost("b", (alone,)), rates={"attention_half": 2048}) == parts_of(BlockCost("b", (alone,)))


def test_a_step_has_its_microbatches_the_optimizer_and_idle_time() -> None:
    made, load = model(StageCost((BlockCost("b", (PRODUCT,), parameters=4),)), microbatches=3)
    load.update = Update(traffic=24.0, flops=200.0)
    step = made.step()
    # Accumulation: 3 x 2 bytes x 4 numbers / 8 = 3 for each microbatch. Optimizer: (24 + 2 x 4) / 8 + 200 / 100.
    assert step.parts == {
        "products": 9.0, "elementwise": 9.0, "recomputation": 0.0, "host": 0.0, "bubble": 0.0, "optimizer": 6.0,
        "data parallelism": 0.0, "idle": 4.5,
    }  # fmt: skip
    assert step.total == 18.0 + 6.0 + 4.5
    assert made.least() == 6.0 * 3


@pytest.mark.parametrize(("axis", "shards"), [("dp_shard", Group(2)), ("tp", ONE)])
def test_ranks_that_share_an_update_send_what_they_exchange_in_both_directions(axis: str, shards: Group) -> None:
    stage = StageCost((BlockCost("b", (PRODUCT,), parameters=8),))
    made, load = model(stage, mesh={axis: 2}, of=groups(shards))
    load.update = Update(traffic=24.0, flops=200.0, exchanged=8.0)
    # (24 + 2 x 8) / 8 of memory, 200 / 100 of products, and half of 8 bytes at 2 bytes/s twice.
    assert made.step().parts["optimizer"] == 5.0 + 2.0 + 2 * 2.0


def test_recomputed_blocks_repeat_their_forward_but_kept_attention() -> None:
    block = BlockCost("b", (PRODUCT, ATTENTION), count=2)
    whole = parts_of(block, effect=StrategyCost(recomputed=0.5))
    assert whole["recomputation"] == 2 * 0.5 * (1 + 1)
    kept = parts_of(block, effect=StrategyCost(recomputed=0.5, keeps_attention=True))
    assert kept["recomputation"] == 2 * 0.5 * 1
    frozen = BlockCost("b", (OpCost("p", "product", flops=100),))
    head = BlockCost("h", (PRODUCT,), is_block=False)
    assert "recomputation" not in parts_of(frozen, head, effect=StrategyCost(recomputed=1.0))


def test_the_host_launches_blocks_behind_which_the_device_waits() -> None:
    blocks = [BlockCost("b", (PRODUCT,), count=2), BlockCost("h", (PRODUCT,), is_block=False)]
    rates = {"product": 1000, "launch": 0.9}
    # Forward 0.3 and backward 0.6 of the device; of the host, 0.3 and 0.6 for each of two blocks.
    assert parts_of(*blocks, rates=rates)["host"] == pytest.approx((0.6 - 0.3) + (1.2 - 0.6))
    again = parts_of(*blocks, rates=rates, effect=StrategyCost(recomputed=1.0))
    assert again["host"] == pytest.approx((0.6 - 0.3) + (1.8 - 0.6 - 0.2))
    assert "host" not in parts_of(*blocks, rates={"product": 1000, "launch": 0.4})
    # Frozen blocks are launched forward only: 0.3 for each of three blocks, and 0.6 for one.
    frozen = BlockCost("f", (OpCost("p", "product", flops=100),), count=2)
    found = parts_of(frozen, BlockCost("b", (PRODUCT,)), rates=rates)
    assert found["host"] == pytest.approx((0.9 - 0.3) + (0.6 - 0.2))


def test_collectives_of_blocks_are_waited_for_unless_they_overlap() -> None:
    mesh = {"tp": 2, "cp": 2}
    exchanges = (Exchange("all_gather", "tp", 8.0, count=2), Exchange("send", "cp", 6.0))
    block = BlockCost("b", (PRODUCT, ATTENTION), exchanges=exchanges, backward_exchanges=exchanges[:1], count=3)
    # All-gather: half of 8 bytes at 2 bytes/s, twice: 4; send: 6 / 2 = 3.
    found = parts_of(block, mesh=mesh)
    assert (found["tensor parallelism"], found["context parallelism"]) == (3 * (4 + 4), 3 * 3)
    # During products of 1 and 2: 4 - 1 + 0.5 x 1 and 4 - 2 + 0.5 x 2.
    hidden = parts_of(block, mesh=mesh, effect=StrategyCost(overlaps=frozenset({"tp"})))
    assert (hidden["tensor parallelism"], hidden["context parallelism"]) == (3 * (3.5 + 3), 3 * 3)
    # Recomputation repeats the forward's.
    again = parts_of(block, mesh=mesh, effect=StrategyCost(recomputed=1.0))
    assert (again["tensor parallelism"], again["context parallelism"]) == (3 * (4 + 4 + 4), 3 * (3 + 3))
    beside = BlockCost("b", (PRODUCT, ATTENTION), beside=exchanges[1:], backward_beside=exchanges[1:])
    # During attention of 1 and 3: 3 - 1 + 0.5 x 1 and 0 + 0.5 x 3.
    assert parts_of(beside, mesh=mesh)["context parallelism"] == 2.5 + 1.5
    some = BlockCost("b", (PRODUCT,), exchanges=(Exchange("all_gather", "cp", 8.0, ranks=4, stride=2),))
    # Four ranks at a distance of 2 x 2 in machines of 8: two on a machine; half of 8 bytes crosses in two shares.
    assert parts_of(some, mesh=mesh)["context parallelism"] == max(6 / 2, 8 / 2 / 2 / 1)
    assert parts_of(some, mesh=mesh, rates={"network": 0.25})["context parallelism"] == 8 / 2 / 2 / 0.25
    pair = BlockCost("b", (PRODUCT,), exchanges=(Exchange("all_gather", "cp", 8.0, ranks=2, stride=2),))
    assert parts_of(pair, mesh=mesh)["context parallelism"] == 8 / 2 / 2


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        # During products of 2 and 4: 8 - 2 + 0.5 x 2, and 6 - 4 + 0.5 x 4.
        ({"exchanges": (Exchange("all_gather", "tp", 16.0, count=2),),
          "backward_exchanges": (Exchange("all_gather", "tp", 8.0, count=3),)}, {"tensor parallelism": 7.0 + 4.0}),
        # During attention of 2 and 6: 3 - 2 + 0.5 x 2, and 8 - 6 + 0.5 x 6.
        ({"beside": (Exchange("send", "cp", 6.0),)}, {"context parallelism": 2.0}),
        ({"backward_beside": (Exchange("send", "cp", 16.0),)}, {"context parallelism": 5.0}),
        ({"exchanges": (Exchange("send", "cp", 2.0),), "beside": (Exchange("send", "cp", 6.0),),
          "backward_exchanges": (Exchange("send", "cp", 4.0),), "backward_beside": (Exchange("send", "cp", 16.0),)},
         {"context parallelism": 1.0 + 2.0 + 2.0 + 5.0}),
    ],
)  # fmt: skip
def test_communication_overlaps_with_all_products_or_attentions_of_its_block(
    given: dict[str, Any], seconds: dict[str, float]
) -> None:
    block = BlockCost("b", (PRODUCT, ATTENTION, PRODUCT, ATTENTION), **given)
    effect = StrategyCost(overlaps=frozenset({"tp"}))
    found = parts_of(block, mesh={"tp": 2, "cp": 2}, effect=effect)
    assert {name: taken for name, taken in found.items() if name not in ("products", "attention")} == seconds | {
        name: taken for name, taken in found.items() if name == "recomputation"
    }


def test_a_block_may_communicate_over_any_axis() -> None:
    block = BlockCost("b", (PRODUCT,), exchanges=(Exchange("all_gather", "dp_shard", 8.0),), count=3)
    assert parts_of(block, mesh={"dp_shard": 2})["data parallelism"] == 3 * 2.0


FSDP = StrategyCost(shards=True, gathers="twice", reduces="each")


@pytest.mark.parametrize(
    ("effect", "seconds"),
    [
        # 8 numbers of 2 bytes, of which half travels at 2 bytes/s: 4 seconds a gather, and 4 to reduce. During a
        # forward of 1 and a backward of 2, 4 becomes 3.5, and 8 becomes 7. Reduced gradients are copied: 32 bytes.
        (FSDP, 3.5 + 7 + 32 / 8),
        (StrategyCost(shards=True, gathers="once", reduces="each"), 3.5 + 3 + 32 / 8),
        (StrategyCost(shards=True, gathers="once", reduces="last"), 3.5 + 3),  # after the last microbatch
        (StrategyCost(shards=True, gathers="never", reduces="each"), 3.0),
        (StrategyCost(reduces="each"), 0.0),
        (StrategyCost(gathers="once", reduces="each"), 0.0),  # nothing is sharded
        (FSDP | StrategyCost(compute_width=4), 3.5 + 7 + 32 / 8),
        (FSDP | StrategyCost(compute_width=2), 3.5 + 7 + (2 * 24 + 32) / 8),
        (FSDP | StrategyCost(reduce_width=4), 3.5 + (12 - 2 + 1)),  # in place, as the parameters have 4 bytes
        (FSDP | StrategyCost(offloads=True), 3.5 + 7 + (2 * 32 + 32) / 8),
        (FSDP | StrategyCost(offloads=True, reduce_width=4), 3.5 + (12 - 2 + 1) + (2 * 32 + 64) / 8),
        # Copies of 3 seconds prolong the backward, which hides the reduction.
        (StrategyCost(shards=True, gathers="once", reduces="last", compute_width=2), 3.5 + 24 / 8 + 0.5 * 4),
    ],
)
def test_gathers_and_reductions_overlap_with_the_computation_of_a_microbatch(
    effect: StrategyCost, seconds: float
) -> None:
    block = BlockCost("b", (PRODUCT,), parameters=8)
    found = parts_of(block, effect=effect, of=groups(Group(2)), mesh={"dp_shard": 2})
    assert found.get("data parallelism", 0.0) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("effect", "of", "seconds"),
    [
        # Twice 8 numbers: gathers of 8 and reductions of 8 during a forward of 2 and a backward of 4. Experts that are
        # not sharded are neither gathered nor copied.
        (FSDP | StrategyCost(compute_width=2), groups(Group(2)), (8 - 2 + 1) + (16 - 4 + 2) + (2 * 48 + 64) / 8),
        # In 4 bytes, reductions of 16 to shards and of 2 x 16 bytes / 2 over replicas, which need a copy.
        (FSDP | StrategyCost(reduce_width=4), groups(Group(2), Group(2)), 7 + (8 + 16 + 16 - 4 + 2) + 2 * 64 / 8),
    ],
)
def test_each_of_several_equal_blocks_is_gathered_and_reduced(
    effect: StrategyCost, of: DataGroups, seconds: float
) -> None:
    block = BlockCost("b", (PRODUCT,), 8, 4, count=2)
    found = parts_of(block, effect=effect, of=of, mesh={"dp_shard": 2, "dp_replicate": of.replicas.size})
    assert found["data parallelism"] == pytest.approx(seconds)


@pytest.mark.parametrize(("microbatches", "seconds"), [(1, 0.0), (2, 2 * 1.5), (3, 3 * 1.5)])
def test_shards_of_gradients_are_accumulated_over_several_microbatches(microbatches: int, seconds: float) -> None:
    stage = StageCost((BlockCost("b", (PRODUCT,), parameters=4),))
    made, load = model(
        stage, effect=StrategyCost(shards=True), of=groups(Group(2)), mesh={"dp_shard": 2}, microbatches=microbatches
    )
    load.update = Update(traffic=24.0)
    parts = made.step().parts
    # 3 x 2 bytes of each of 2 numbers at 8 bytes/s; the update reads gradients once.
    assert (parts.get("elementwise", 0.0), parts["optimizer"]) == (seconds, (24 + 2 * 2) / 8)


def test_replicas_that_take_their_own_steps_reduce_no_gradients_and_meet_after_some_steps() -> None:
    stages = [StageCost((BlockCost("b", (PRODUCT,), 8 - at, 4 - at),)) for at in (0, 4)]
    effect = StrategyCost(reduces="each", meets_every=4)
    made, _ = model(*stages, effect=effect, of=groups(replicas=Group(2)), mesh={"dp_replicate": 2}, hosts=[0, 0])
    step = made.step()
    # Twice half of 4 x 12 bytes at 2 bytes/s, every fourth step.
    assert step.parts["data parallelism"] == 24.0 / 4
    assert step.parts["optimizer"] == 2 * (12 + 4) / 8
    assert step.total == sum(step.parts.values()) == 6.0 + 6.0 + 4.0 + 0.25 * 6.0


@pytest.mark.parametrize(
    ("reduces", "seconds"),
    [
        # Experts are in shards of 4: 16 x 2 bytes x 3/4 / 2 = 12; over two replicas, 2 x (16 x 2 bytes / 2) / 2 = 16
        # for the other 16 parameters, which are not sharded. Frozen ones are not reduced. The last reduction over
        # replicas runs during a backward of 2 and the exposed 11 of the shards.
        ("each", 12 + 16 - 2 + 1), ("replicas_last", (12 - 2 + 1) + (16 - 13 + 6.5)), ("last", 28 - 2 + 1),
    ],
)  # fmt: skip
def test_replicas_and_experts_are_reduced_over_their_own_ranks(reduces: Any, seconds: float) -> None:
    block = BlockCost("b", (PRODUCT,), 20, 20, frozen=4, frozen_experts=4)
    effect = StrategyCost(shards=True, reduces=reduces)
    found = parts_of(block, effect=effect, of=groups(ONE, Group(2), Group(4)), mesh={"dp_shard": 2})
    assert found["data parallelism"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("width", "of_gradients", "seconds"),
    # 8 numbers, of which half travels at 2 bytes/s, during a backward of 2, or of 20 in float32.
    [(2, 2, 4 - 2 + 1), (4, 2, 8 / 2), (2, 4, 8 - 2 + 1)],
)
def test_gradients_are_reduced_in_the_wider_of_their_dtype_and_that_of_the_computation(
    width: int, of_gradients: int, seconds: float
) -> None:
    stage = StageCost((BlockCost("b", (PRODUCT,), parameters=8),))
    effect = StrategyCost(shards=True, reduces="last")
    made, load = model(stage, effect=effect, of=groups(Group(2)), mesh={"dp_shard": 2}, width=width)
    load.gradient_width = of_gradients
    assert made.step().parts["data parallelism"] == seconds


def test_parameters_outside_of_blocks_are_gathered_first_and_reduced_last() -> None:
    block = BlockCost("b", (PRODUCT,), parameters=8)
    embedding = BlockCost("e", (), parameters=4, is_block=False)
    effect = FSDP | StrategyCost(reduce_width=4)
    found = parts_of(embedding, block, effect=effect, of=groups(Group(2)), mesh={"dp_shard": 2})
    # Gathers of 12 numbers take 6, reductions 12; of 4 numbers alone, 2 and 4.
    assert found["data parallelism"] == pytest.approx((6 - 1 + 0.5) + (18 - 2 + 1) + 2 + 4)
    # In 2 bytes, reductions take as long as gathers, and both need copies in microbatches.
    cast = FSDP | StrategyCost(compute_width=2)
    found = parts_of(embedding, block, effect=cast, of=groups(Group(2)), mesh={"dp_shard": 2})
    assert found["data parallelism"] == pytest.approx(5.5 + (12 - 2 + 1) + (2 * 36 + 48) / 8 + 2 + 2)


def test_gradients_that_no_strategy_reduces_are_summed_over_context_parallel_ranks() -> None:
    stages = [StageCost((BlockCost("b", (PRODUCT,), parameters=number, count=2),)) for number in (4, 8)]
    made, _ = model(*stages, mesh={"cp": 2}, hosts=[0, 0])
    # Twice half of 2 x 8 x 2 bytes at 2 bytes/s.
    assert made.step().parts["data parallelism"] == 16.0


def test_a_pipeline_is_simulated_up_to_its_steady_state() -> None:
    stages = [
        StageCost((BlockCost("b", (PRODUCT,), parameters=2, count=count),), boundary=boundary)
        for count, boundary in ((1, 4.0), (2, 6.0), (1, 2.0))
    ]
    made, load = model(*stages, mesh={"pp": 2}, microbatches=7, pipeline="1f1b", hosts=[0, 1, 0])
    load.update = Update(traffic=12.0, exchanged=0.0)
    step = made.step()
    ((programs, times),) = load.simulated
    assert programs == "programs of 4"
    # Accumulation reads and writes 3 x 2 bytes of each of 2 numbers at 8 bytes/s: 1.5 for each block.
    assert (times.forward, times.backward, times.weight, times.transfer) == ([1, 2, 1], [3.5, 7, 3.5], [1, 2, 1], 3.0)
    total = 100 + 3 * 9  # the busiest rank has 9 seconds for each further microbatch
    busy = 7 * (4.5 + 9 + 4.5) / 2
    assert step.parts["bubble"] == total - busy
    assert step.parts["products"] == 7 * (3 + 6 + 3) / 2
    # The rank with stages 0 and 2 updates (12 + 2 x 2) / 8 twice, the other one (12 + 2 x 4) / 8.
    assert step.parts["optimizer"] == 4.0
    assert step.total == total + 4.0 + 0.25 * busy
    assert made.least() == 9.0 * (7 + 1 / 4)
    load.fails = True
    with pytest.raises(JobError, match="^pipeline: too few$"):
        made.step()


def test_compiled_and_recomputed_blocks_have_no_weight_gradients_of_their_own() -> None:
    for effect in (StrategyCost(compiled=True), StrategyCost(recomputed=0.5)):
        stage = StageCost((BlockCost("b", (PRODUCT,)),))
        made, load = model(stage, stage, mesh={"pp": 2}, microbatches=2, pipeline="x", hosts=[0, 1], effect=effect)
        made.step()
        assert load.simulated[0][1].weight == [0.0, 0.0]


def test_weight_gradients_are_the_backward_beyond_the_forward_of_products_in_blocks() -> None:
    grouped = OpCost("g", "grouped_product", flops=50, backward_flops=150)
    norm = OpCost("m", "memory", traffic=4, backward_traffic=12)
    block = BlockCost("b", (PRODUCT, ATTENTION, grouped, norm), count=2)
    head = BlockCost("h", (PRODUCT,), is_block=False)
    stage = StageCost((block, head))
    made, load = model(stage, stage, mesh={"pp": 2}, microbatches=2, pipeline="x", hosts=[0, 1])
    made.step()
    assert load.simulated[0][1].weight == [2 * (1.0 + 2.0)] * 2
